-- The operations on documents, and the reads. The storage is described in redis_docs.lua.

-- Members that are read at once. For one reply: members that are checked, and bytes.
local CHUNK, SEEN, BYTES = 100, 1000, 200000

ops['documents.put'] = function(space, kind, key, body, group, rank, ends, words, mark, expect, at)
  local place = place_of(space, kind)
  local found = doc_at(place, key)
  local there = live(found.is, at)
  local version = there and there.version or 0
  tx.docs_at = at
  if expect ~= null and expect ~= version then
    if there and version == expect + 1 and there.body == body and there.mark == mark then
      return raw('[' .. text(version) .. ',' .. text(there.rank) .. ']')
    end
    refuse('CHANGED')
  end
  if rank == null then
    rank = there and there.group == group and there.rank or next_doc_rank(place, group)
  end
  found.words = words
  set_doc(place, found, {
    version = version + 1, rank = rank, ends = ends ~= null and ends or nil, mark = mark, group = group, body = body,
  })
  return raw('[' .. text(version + 1) .. ',' .. text(rank) .. ']')
end

applied['documents.put'] = function(space, kind, key, body, group, rank, ends, words, mark, expect, at)
  local there = live(doc_at(place_of(space, kind), key).is, at)
  if not there or there.body ~= body or there.mark ~= mark or expect ~= null and there.version ~= expect + 1 then
    not_applied()
  end
  return raw('[' .. text(there.version) .. ',' .. text(there.rank) .. ']')
end

ops['documents.add'] = function(space, kind, key, body, group, rank, ends, words, mark, at)
  if live(doc_at(place_of(space, kind), key).is, at) then return null end
  return ops['documents.put'](space, kind, key, body, group, rank, ends, words, mark, null, at)
end

applied['documents.add'] = function(space, kind, key, body, group, rank, ends, words, mark, at)
  return applied['documents.put'](space, kind, key, body, group, rank, ends, words, mark, null, at)
end

ops['documents.touch'] = function(space, kind, key, rank, ends, at)
  local place = place_of(space, kind)
  local found = doc_at(place, key)
  local there = live(found.is, at)
  if not there then refuse('ABSENT') end
  local moved = touched(there, rank, ends)
  if moved.rank ~= there.rank or moved.ends ~= there.ends then set_doc(place, found, moved) end
  return null
end

ops['documents.rewrite'] = function(space, kind, key, old, new, keeps_words, at)
  local place = place_of(space, kind)
  local found = doc_at(place, key)
  local there = live(found.is, at)
  if not there or there.body ~= old then return false end
  if not keeps_words then found.words = '' end
  set_doc(place, found, {
    version = there.version, rank = there.rank, ends = there.ends, mark = there.mark, group = there.group, body = new,
  })
  return true
end

-- Stores a document of another store: its version, its rank and the rest.
ops['documents.copy'] = function(space, kind, key, doc, ends, words)
  local place = place_of(space, kind)
  local found = doc_at(place, key)
  doc.ends, doc.mark, found.words = ends ~= null and ends or nil, 0, words
  set_doc(place, found, doc)
  return null
end

applied['documents.touch'] = function(space, kind, key, rank, ends, at)
  local there = live(doc_at(place_of(space, kind), key).is, at)
  local moved = there and touched(there, rank, ends)
  if not there or moved.rank ~= there.rank or moved.ends ~= there.ends then not_applied() end
  return null
end

ops['documents.delete'] = function(space, kind, key, at)
  local place = place_of(space, kind)
  local found = doc_at(place, key)
  if not live(found.is, at) then return false end
  set_doc(place, found, nil)
  return true
end

applied['documents.delete'] = function(space, kind, key, at)
  if live(doc_at(place_of(space, kind), key).is, at) then not_applied() end
  return true
end

ops['documents.clear'] = function(space, kind, group, at)
  local place = place_of(space, kind)
  if group == null then return clear_kind(place, at) end
  return clear_group(place, group, at)
end

ops['documents.drop'] = function(space, at)
  local places = {}
  for _, place in ipairs(call('SMEMBERS', P .. 'dockinds:' .. space)) do places[place] = true end
  for place in pairs(tx.docs or {}) do
    if space_of(place) == space then places[place] = true end
  end
  for place in pairs(places) do clear_kind(place, at) end
  return null
end

-- reads

-- Returns [key, version, rank, group, end, text] as JSON, or only the key if the document cannot be read.
local function encode_doc(key, doc)
  if not doc then return cjson.encode(key) end
  return '[' .. cjson.encode(key) .. ',' .. text(doc.version) .. ',' .. text(doc.rank) .. ',' .. cjson.encode(doc.group)
    .. ',' .. (doc.ends and text(doc.ends) or 'null') .. ',' .. doc.body .. ']'
end

-- Returns [how many of the keys were read, [documents]].
ops['documents.get'] = function(space, kind, keys, at)
  local place, found, size, seen = place_of(space, kind), {}, 0, 0
  for _, key in ipairs(keys) do
    if size > BYTES then break end
    seen = seen + 1
    local stored = call('HGET', P .. 'doc:' .. place, key)
    local doc = stored and parsed(stored)
    if stored and (not doc or live(doc, at)) then
      found[#found + 1] = encode_doc(key, doc)
      size = size + #found[#found]
    end
  end
  return raw('[' .. seen .. ',[' .. table.concat(found, ',') .. ']]')
end

-- Calls `see` for each document after `after`, [rank, key], up to the limits of one reply. Returns the last one, or null
-- if there are no more.
local function through(place, line, low, high, down, after, see)
  local least = '[' .. line .. (low ~= null and ordered(low) or '')
  local most = '(' .. line .. (high ~= null and ordered(high) or '\255\255')
  local seen, order = 0, P .. 'docorder:' .. place
  local last = after ~= null and line .. ordered(after[1]) .. after[2]
  while true do
    if last and down then most = '(' .. last elseif last then least = '(' .. last end
    local page
    if down then
      page = call('ZREVRANGEBYLEX', order, most, least, 'LIMIT', 0, CHUNK)
    else
      page = call('ZRANGEBYLEX', order, least, most, 'LIMIT', 0, CHUNK)
    end
    for _, member in ipairs(page) do
      last, seen = member, seen + 1
      local key = string.sub(member, #line + 9)
      if see(key) or seen >= SEEN then
        return '[' .. text(rank_of(string.sub(member, #line + 1, #line + 8))) .. ',' .. cjson.encode(key) .. ']'
      end
    end
    if #page < CHUNK then return 'null' end
  end
end

-- Returns [cursor for the next call, [[space, kind], ...]]. The cursor is "0" at the beginning and at the end.
ops['documents.kinds'] = function(cursor)
  local page, found = call('SCAN', cursor, 'MATCH', P .. 'dockinds:*', 'COUNT', 500), {}
  for _, key in ipairs(page[2]) do
    for _, place in ipairs(call('SMEMBERS', key)) do
      local space = space_of(place)
      found[#found + 1] = {space, string.sub(place, #place_of(space, '') + 1)}
    end
  end
  return {page[1], found}
end

-- Returns [`after` for the next call, the remaining offset, [documents]].
ops['documents.find'] = function(space, kind, at, group, prefix, low, high, down, offset, limit, after)
  local place, found, size = place_of(space, kind), {}, 0
  local came = through(place, line_of(group), low, high, down, after, function(key)
    if string.sub(key, 1, #prefix) ~= prefix then return false end
    local stored = call('HGET', P .. 'doc:' .. place, key)
    local doc = stored and parsed(stored)
    if doc and not live(doc, at) then return false end
    if offset > 0 then
      offset = offset - 1
      return false
    end
    found[#found + 1] = encode_doc(key, doc)
    size = size + #found[#found]
    return #found >= limit or size > BYTES
  end)
  return raw('[' .. came .. ',' .. offset .. ',[' .. table.concat(found, ',') .. ']]')
end

-- Returns [`after` for the next call, [[key, rank, words], ...]].
ops['documents.words'] = function(space, kind, at, after)
  local place, found, size = place_of(space, kind), {}, 0
  local came = through(place, 'r', null, null, false, after, function(key)
    local words = call('HGET', P .. 'docwords:' .. place, key)
    local stored = words and call('HGET', P .. 'doc:' .. place, key)
    local doc = stored and live(parsed(stored), at)
    if not doc then return false end
    found[#found + 1] = '[' .. cjson.encode(key) .. ',' .. text(doc.rank) .. ',' .. cjson.encode(words) .. ']'
    size = size + #found[#found]
    return size > BYTES
  end)
  return raw('[' .. came .. ',[' .. table.concat(found, ',') .. ']]')
end
