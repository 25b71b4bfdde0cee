-- The storage of documents. The place of a kind is "<length of the space>:<space><kind>". Its keys are:
--
-- doc:<place>       a hash of the documents by key: "<version> <rank> <end> <mark> <length of the group> <group><text>",
--                   with the text as a JSON string
-- docorder:<place>  a sorted set in lexical order. Each document has the members "r<rank><key>" and
--                   "g<length of the group>:<group><rank><key>", with the rank as eight bytes that sort like the number
-- docwords:<place>  a hash of the searchable words by key, for documents that have words
-- docends:<place>   a sorted set of keys by the time at which they expire
--
-- `docdue` is a sorted set of places by a time before which none of their documents expires. dockinds:<space> is the set
-- of the places of a space. A place without documents has no keys. Only version 0.6.0 uses `docstamps`, to count changes.

local SWEPT = 8 -- expired documents that a write deletes, at most

local function place_of(space, kind)
  return #space .. ':' .. space .. kind
end

local function space_of(place)
  local size, at = string.match(place, '^(%d+):()')
  return string.sub(place, at, at + size - 1)
end

local function ordered(rank)
  local high, low = struct.unpack('>I4I4', struct.pack('>d', rank + 0))
  if high >= 2147483648 then
    return struct.pack('>I4I4', 4294967295 - high, 4294967295 - low)
  end
  return struct.pack('>I4I4', high + 2147483648, low)
end

local function rank_of(bytes)
  local high, low = struct.unpack('>I4I4', bytes)
  if high >= 2147483648 then
    high = high - 2147483648
  else
    high, low = 4294967295 - high, 4294967295 - low
  end
  return (struct.unpack('>d', struct.pack('>I4I4', high, low)))
end

local function line_of(group)
  return group == null and 'r' or 'g' .. #group .. ':' .. group
end

local function members(key, doc)
  local at = ordered(doc.rank) .. key
  return 'r' .. at, line_of(doc.group) .. at
end

local function parsed(stored)
  local version, rank, ends, mark, size, at = string.match(stored, '^(%d+) (%S+) (%S+) (%d+) (%d+) ()')
  if not at then return nil end
  at = at + size
  return {
    version = tonumber(version), rank = tonumber(rank), ends = tonumber(ends), mark = tonumber(mark),
    group = string.sub(stored, at - size, at - 1), body = string.sub(stored, at),
  }
end

local function stored_as(doc)
  local ends = doc.ends and text(doc.ends) or '-'
  return text(doc.version) .. ' ' .. text(doc.rank) .. ' ' .. ends .. ' ' .. string.format('%.0f', doc.mark) .. ' '
    .. #doc.group .. ' ' .. doc.group .. doc.body
end

local function live(doc, at)
  if doc and not (doc.ends and doc.ends <= at) then return doc end
end

local function docs(place)
  tx.docs = tx.docs or {}
  local found = tx.docs[place]
  if not found then
    found = {known = {}, last = {}}
    tx.docs[place] = found
  end
  return found
end

-- A document as it `was` before this commit, and as it `is` within it.
local function doc_at(place, key)
  local here = docs(place)
  local found = here.known[key]
  if not found then
    local stored = not here.cleared and call('HGET', P .. 'doc:' .. place, key)
    local doc = stored and (parsed(stored) or refuse('CORRUPT')) or nil
    found = {was = doc, is = doc}
    here.known[key] = found
  end
  return found
end

local function set_doc(place, found, doc)
  found.is, found.dirty = doc, true
  if doc then
    local last = docs(place).last
    last[doc.group] = math.max(last[doc.group] or 0, doc.rank)
  end
end

-- Returns a rank greater than all ranks of a group.
local function next_doc_rank(place, group)
  local here, last = docs(place), 0
  if not here.cleared then
    local line, order = line_of(group), P .. 'docorder:' .. place
    local member = call('ZREVRANGEBYLEX', order, '(' .. line .. '\255\255', '[' .. line, 'LIMIT', 0, 1)[1]
    if member then last = math.max(rank_of(string.sub(member, #line + 1, #line + 8)), 0) end
  end
  last = math.max(last, here.last[group] or 0)
  return last + 1 > last and last + 1 or last * (1 + 2 ^ -52)
end

local function touched(doc, rank, ends)
  local later = doc.ends and ends ~= null and math.max(doc.ends, ends) or doc.ends
  return {
    version = doc.version, rank = math.max(doc.rank, rank), ends = later, mark = doc.mark, group = doc.group,
    body = doc.body,
  }
end

local function forget_kind(place)
  write('HDEL', P .. 'docstamps', place)
  write('SREM', P .. 'dockinds:' .. space_of(place), place)
  write('ZREM', P .. 'docdue', place)
end

-- Deletes all documents of a kind, and returns how many there were.
local function clear_kind(place, at)
  local here, count = docs(place), 0
  if not here.cleared then
    count = call('HLEN', P .. 'doc:' .. place) - call('ZCOUNT', P .. 'docends:' .. place, '-inf', text(at))
  end
  for _, found in pairs(here.known) do
    if live(found.was, at) then count = count - 1 end
    if live(found.is, at) then count = count + 1 end
  end
  write('UNLINK', P .. 'doc:' .. place, P .. 'docorder:' .. place, P .. 'docwords:' .. place, P .. 'docends:' .. place)
  forget_kind(place)
  tx.docs[place] = {known = {}, last = {}, cleared = true}
  return count
end

local function clear_group(place, group, at)
  local here, line, count = docs(place), line_of(group), 0
  local ends = P .. 'docends:' .. place
  local expiring = call('EXISTS', ends) == 1
  local found = here.cleared and {} or
    call('ZRANGEBYLEX', P .. 'docorder:' .. place, '[' .. line, '(' .. line .. '\255\255')
  for _, member in ipairs(found) do
    local key = string.sub(member, #line + 9)
    if not here.known[key] then
      -- Only the fields that deleting the document needs.
      local doc = {rank = rank_of(string.sub(member, #line + 1, #line + 8)), group = group}
      doc.ends = expiring and tonumber(call('ZSCORE', ends, key)) or nil
      here.known[key] = {was = doc, is = doc}
    end
  end
  for _, doc in pairs(here.known) do
    if doc.is and doc.is.group == group then
      if live(doc.is, at) then count = count + 1 end
      set_doc(place, doc, nil)
    end
  end
  return count
end

-- writing the changes of a commit

-- Deletes a few expired documents of the place that is due first.
local function sweep(at)
  local place = call('ZRANGEBYSCORE', P .. 'docdue', '-inf', text(at), 'LIMIT', 0, 1)[1]
  if not place or docs(place).cleared then return end
  local ends = P .. 'docends:' .. place
  local gone = call('ZRANGEBYSCORE', ends, '-inf', text(at), 'LIMIT', 0, SWEPT)
  for _, key in ipairs(gone) do
    local readable, found = pcall(doc_at, place, key)
    if not readable then
      write('ZREM', ends, key)  -- a damaged document is kept, and must not fail a write to another one
    elseif found.is and not live(found.is, at) then
      found.is, found.dirty = nil, true
    elseif not found.was and not found.is then
      write('ZREM', ends, key)
    end
  end
  if #gone == SWEPT then return end
  local first = call('ZRANGEBYSCORE', ends, '(' .. text(at), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if first then write('ZADD', P .. 'docdue', first, place) else write('ZREM', P .. 'docdue', place) end
end

local function bulk(command, key, list)
  for i = 1, #list, 1000 do write(command, key, unpack(list, i, math.min(i + 999, #list))) end
end

local function note(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

local function keep_doc(place, key, found, lists)
  local was, is = found.was, found.is
  local r, g, r_was, g_was
  if is then
    r, g = members(key, is)
    note(lists.set, key, stored_as(is))
    if is.ends then
      note(lists.ends, text(is.ends), key)
      lists.due = math.min(lists.due or is.ends, is.ends)
    end
  else
    note(lists.gone, key)
  end
  if was then r_was, g_was = members(key, was) end
  if g_was and g_was ~= g then note(lists.disorder, r_was ~= r and r_was or g_was, g_was) end
  if g and g_was ~= g then note(lists.order, 0, r, 0, g) end
  if was and was.ends and not (is and is.ends) then note(lists.endless, key) end
  if is and found.words and found.words ~= '' then
    note(lists.words, key, found.words)
  elseif was and (not is or found.words) then
    note(lists.wordless, key)
  end
  return (is and 1 or 0) - (was and 1 or 0)
end

local function keep_kind(place, here)
  local lists = {set = {}, gone = {}, order = {}, disorder = {}, ends = {}, endless = {}, words = {}, wordless = {}}
  local more = 0
  for key, found in pairs(here.known) do
    if found.dirty and (found.was or found.is) then more = more + keep_doc(place, key, found, lists) end
  end
  bulk('HDEL', P .. 'doc:' .. place, lists.gone)
  bulk('HSET', P .. 'doc:' .. place, lists.set)
  bulk('ZREM', P .. 'docorder:' .. place, lists.disorder)
  bulk('ZADD', P .. 'docorder:' .. place, lists.order)
  bulk('ZREM', P .. 'docends:' .. place, lists.endless)
  bulk('ZADD', P .. 'docends:' .. place, lists.ends)
  bulk('HDEL', P .. 'docwords:' .. place, lists.wordless)
  bulk('HSET', P .. 'docwords:' .. place, lists.words)
  if lists.due then write('ZADD', P .. 'docdue', 'LT', text(lists.due), place) end
  if #lists.gone > 0 and #lists.set == 0 and call('HLEN', P .. 'doc:' .. place) + more == 0 then
    forget_kind(place)
  elseif #lists.set > 0 then
    write('SADD', P .. 'dockinds:' .. space_of(place), place)
  end
end

flushes[#flushes + 1] = function()
  if not tx.docs then return end
  if tx.docs_at then sweep(tx.docs_at) end
  for place, here in pairs(tx.docs) do keep_kind(place, here) end
end
