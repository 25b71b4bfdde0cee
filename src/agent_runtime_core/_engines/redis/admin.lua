-- Rare operations that no component defines, and helpers of reads.

-- A long reply is split into pages by its length, so that one reply cannot block the server for long.
local ENOUGH = 1000000  -- characters after which a page ends, by default
local AT_ONCE = 32  -- most items that are read before their length is known

-- Calls see(item), which returns the item's length, for each item of the pages more(last, count). Ends after `enough`
-- characters or `limit` items. Then it returns the last item, as there may be more; otherwise it returns nothing.
local function through(limit, more, see, enough)
  local size, count, left, last = 0, 1, limit, nil
  while left > 0 do
    local asked = math.min(count, left)
    local page = more(last, asked)
    for _, thing in ipairs(page) do
      size, last, left = size + see(thing), thing, left - 1
      if size >= (enough or ENOUGH) then return last end
    end
    if #page < asked then return nil end
    count = math.min(2 * count, AT_ONCE)
  end
  return last
end

-- Returns true if a reply is an error about missing permissions, as servers from version 6.2 on phrase it.
local function is_forbidden(said)
  for _, words in ipairs({'NOPERM', 'ACL failure', 'user executing the script'}) do
    if type(said) == 'table' and said.err and string.find(said.err, words, 1, true) then return true end
  end
end

-- Returns the write commands that the user has no permission for. A commit that reached such a command would be
-- partially written. Each command is tried on a key with a string value, which none of them changes, and which is
-- deleted at the end.
ops['rights'] = function()
  local key, forbidden = P .. 'rights', {}
  for _, command in ipairs({
    {'DEL', key}, {'UNLINK', key}, {'SET', key, ''}, {'INCR', key}, {'HSET', key, 'f', ''}, {'HDEL', key, 'f'},
    {'ZADD', key, 0, 'm'}, {'ZREM', key, 'm'}, {'SADD', key, 'm'}, {'SREM', key, 'm'}, {'RPUSH', key, 'm'},
    {'XADD', key, '1-1', 'f', ''}, {'XTRIM', key, 'MAXLEN', 0}, {'PEXPIRE', key, 60000},
  }) do
    -- If the user may not delete the key, the other commands are not tried: the key would remain.
    if forbidden[1] ~= 'DEL' and is_forbidden(redis.pcall(unpack(command))) then forbidden[#forbidden + 1] = command[1] end
  end
  redis.pcall('DEL', key)
  return forbidden
end

-- What moves of a store read.

ops['fence.of'] = function(key)
  return fenced(key) or null
end

ops['fence.now'] = function()
  return text(now())
end

-- Returns [cursor for the next call, ids of the keys <kind>:<id>], for kinds with the types of their keys. Keys of another
-- type are indexes. The cursor is "0" at the beginning and at the end.
ops['fence.ids'] = function(cursor, kinds)
  local page, found = call('SCAN', cursor, 'MATCH', P .. '*', 'COUNT', 500), {}
  for _, key in ipairs(page[2]) do
    local kind, id = string.match(string.sub(key, #P + 1), '^(%l+):(.*)$')
    if kinds[kind] and call('TYPE', key).ok == kinds[kind] then found[#found + 1] = id end
  end
  return {page[1], found}
end
