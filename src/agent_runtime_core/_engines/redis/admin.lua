-- What is asked of a server seldom, whatever concerns there are.

-- Long answers: each ends after so much text, however few things that are, and says where to go on from.
local ENOUGH = 1000000  -- characters
local AT_ONCE = 32  -- things that are read before their length is known, at most

-- Calls see(thing) with the things that more(last, count) gives, one by one; it tells their length. Ends with enough
-- text, or `limit` things: then it returns the last one seen, behind which there may be more, and else nothing.
local function through(limit, more, see)
  local size, count, left, last = 0, 1, limit, nil
  while left > 0 do
    local asked = math.min(count, left)
    local page = more(last, asked)
    for _, thing in ipairs(page) do
      size, last, left = size + see(thing), thing, left - 1
      if size >= ENOUGH then return last end
    end
    if #page < asked then return nil end
    count = math.min(2 * count, AT_ONCE)
  end
  return last
end

-- What a server says where our user may not, by 6.2 and later.
local function is_forbidden(said)
  for _, words in ipairs({'NOPERM', 'ACL failure', 'user executing the script'}) do
    if type(said) == 'table' and said.err and string.find(said.err, words, 1, true) then return true end
  end
end

-- Those commands that our user may not use, of all that commits write with: one that got to them half-way would stay half
-- written. They are tried on a text, which none of them changes, and which is gone again after.
ops['rights'] = function()
  local key, forbidden = P .. 'rights', {}
  for _, command in ipairs({
    {'DEL', key}, {'UNLINK', key}, {'SET', key, ''}, {'INCR', key}, {'HSET', key, 'f', ''}, {'HDEL', key, 'f'},
    {'ZADD', key, 0, 'm'}, {'ZREM', key, 'm'}, {'SADD', key, 'm'}, {'SREM', key, 'm'}, {'RPUSH', key, 'm'},
    {'XADD', key, '1-1', 'f', ''}, {'XTRIM', key, 'MAXLEN', 0},
  }) do
    -- What cannot be taken away is not made.
    if forbidden[1] ~= 'DEL' and is_forbidden(redis.pcall(unpack(command))) then forbidden[#forbidden + 1] = command[1] end
  end
  redis.pcall('DEL', key)
  return forbidden
end
