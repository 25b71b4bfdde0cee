-- Reads of a journal, and its rare operations.

local function position(entry)
  local ev, seq = string.match(entry[1], '(%d+)-(%d+)')
  return tonumber(ev), tonumber(seq) - 1
end

-- Calls see(entry) with up to `limit` entries of a stream, beginning at the id `from`, until they have `enough`
-- characters. Returns the last one if there may be more.
local function entries(stream, from, limit, see, enough)
  return through(limit, function(last, count)
    return call('XRANGE', stream, last and '(' .. last[1] or from, '+', 'COUNT', count)
  end, function(entry)
    see(entry)
    return #entry[2][#entry[2]]
  end, enough)
end

-- Calls see(entry, ev, seq) for the entries from the id `from` backwards, until it returns a value. Returns that value.
local function backwards(run, from, see)
  local last, count = from, 1
  while true do
    local page = call('XREVRANGE', P .. 'journal:' .. run, last, '-', 'COUNT', count)
    for _, entry in ipairs(page) do
      local found = see(entry, position(entry))
      if found ~= nil then return found end
    end
    if #page < count then return nil end
    last, count = '(' .. page[#page][1], math.min(2 * count, AT_ONCE)
  end
end

applied['journal.append'] = function(run, seq, nev, claim, kind, key)
  local there = backwards(run, '+', function(entry, _, at)
    if at == seq then return cjson.decode(entry[2][4]) end
    if at < seq then return false end
  end)
  if not there or there[5] ~= claim or there[1] ~= kind or there[3] ~= key then lost(run, claim) end
  return seq
end

local function is_end(entry)
  return string.sub(entry[2][4], 1, 8) == '["ended"'
end

-- Returns the position of the last end of the run if `body` is the same end of a generation without a claim.
ops['journal.again'] = function(run, claim, kind, body)
  if kind ~= 'ended' or claim ~= '' then return nil end
  return backwards(run, '+', function(entry, _, at)
    if is_end(entry) then
      local there = cjson.decode(entry[2][4])
      return there[5] == '' and there[4] == cjson.decode(body)[4] and at
    end
  end)
end

-- Deletes one of a run's two streams, and `head:<run>` with the second one. One commit may delete both.
local function forget(run, stream, other)
  write('DEL', P .. stream .. run)
  tx.gone = tx.gone or {}
  tx.gone[stream .. run] = true
  if tx.gone[other .. run] or call('EXISTS', P .. other .. run) == 0 then write('DEL', P .. 'head:' .. run) end
end

local function delete_journal(run)
  forget(run, 'journal:', 'events:')
end

ops['journal.delete'] = function(run)
  delete_journal(run)
  return null
end

-- Replaces the bodies of entries, {id, old body, new body}, and returns of each one whether its old body is stored. Redis
-- cannot change an entry of a stream, so the commit writes the stream again, with the same ids.
local function rewrite_stream(key, changes)
  local entries, by_id, done, differs = call('XRANGE', key, '-', '+'), {}, {}, false
  for _, entry in ipairs(entries) do by_id[entry[1]] = entry[2] end
  for i, change in ipairs(changes) do
    local fields = by_id[change[1]]
    done[i] = fields ~= nil and fields[#fields] == change[2]
    if done[i] then fields[#fields], differs = change[3], true end
  end
  if differs then
    write('DEL', key)
    for _, entry in ipairs(entries) do write('XADD', key, entry[1], unpack(entry[2])) end
  end
  return done
end

ops['journal.rewrite'] = function(run, changes)
  return rewrite_stream(P .. 'journal:' .. run, changes)
end

-- Moves `head:<run>` to what was copied of another store.
local function keep_head(run, seq, ev)
  local place = head(run)
  place.seq, place.ev, place.moved = math.max(place.seq, seq), math.max(place.ev, ev), true
end

-- Appends records of another store, {position, first event number, number of events, body}, unless they are stored.
ops['journal.copy'] = function(run, records)
  for _, record in ipairs(records) do
    local seq, ev, nev, body = unpack(record)
    if seq > head(run).seq then
      write('XADD', P .. 'journal:' .. run, string.format('%d-%d', ev, seq + 1), 'n', text(nev), 'r', body)
      keep_head(run, seq, ev + nev)
    end
  end
  return null
end

-- Returns a record as JSON: [first event number, position, number of events, body].
local function record(entry, ev, seq)
  return '[' .. text(ev) .. ',' .. text(seq) .. ',' .. entry[2][2] .. ',' .. entry[2][4] .. ']'
end

-- Returns [`after` for the next call, records].
ops['journal.records'] = function(run, after, limit)
  local found = {}
  local last = entries(P .. 'journal:' .. run, after, limit, function(entry)
    found[#found + 1] = record(entry, position(entry))
  end)
  local more = last and '"(' .. last[1] .. '"' or 'null'
  return raw('[' .. more .. ',[' .. table.concat(found, ',') .. ']]')
end

-- Returns [`from` for the next call, the last record before `from` that ends a generation]; one of them is null.
ops['journal.ending'] = function(run, from, limit)
  local ending
  local last = through(limit, function(last, count)
    return call('XREVRANGE', P .. 'journal:' .. run, last and '(' .. last[1] or from, '-', 'COUNT', count)
  end, function(entry)
    if is_end(entry) then ending = record(entry, position(entry)) end
    return ending and ENOUGH or #entry[2][4]
  end)
  local more = last and not ending and '"(' .. last[1] .. '"' or 'null'
  return raw('[' .. more .. ',' .. (ending or 'null') .. ']')
end

-- Whether a text of a record is a JSON object or missing: it is not encoded by a payload codec.
local function is_object(value)
  return value == null or value == nil or value:sub(1, 1) == '{'
end

-- Returns [number of runs that were read, [[run, status, generation, info, result], ...]]. `info` has the error and the
-- usage of the result, which may be large. If an older release wrote the record, `result` has these two; if the record is
-- encoded by a payload codec, `result` is whole.
ops['journal.endings'] = function(runs)
  local found, size, count = {}, 0, 0
  for _, run in ipairs(runs) do
    local ending
    backwards(run, '+', function(entry)
      ending = is_end(entry) and entry[2][4]
      return ending or nil
    end)
    count = count + 1
    if ending then
      local fields = cjson.decode(ending)
      local info, result = fields[14], null
      if not is_object(info) or not is_object(fields[7]) then
        result = fields[7] or null
      elseif info == null or cjson.decode(info)['end'] == nil then
        local whole = fields[7] ~= null and cjson.decode(fields[7]) or {}
        result = cjson.encode({error = whole.error, usage = whole.usage})
      end
      found[#found + 1] = cjson.encode({run, fields[2], fields[4], info, result})
      size = size + #ending
      if size >= ENOUGH then break end
    end
  end
  return raw('[' .. text(count) .. ',[' .. table.concat(found, ',') .. ']]')
end

-- Returns the records that have events at or after `since`, as {first event number, record}. If there may be more, also
-- returns the event number at which these begin.
local function boundaries(run, since, limit, enough)
  local found = {}
  local function see(entry)
    local ev, seq = position(entry)
    local count = tonumber(entry[2][2])
    if count > 0 and ev + count > since then found[#found + 1] = {ev, record(entry, ev, seq)} end
  end
  -- Of the records that begin at or before `since`, only the last one with events can have the event `since`.
  backwards(run, string.format('%d', since) .. '-18446744073709551615', function(entry)
    if entry[2][2] ~= '0' then
      see(entry)
      return true
    end
  end)
  local last = entries(P .. 'journal:' .. run, string.format('%d', since + 1), limit, see, enough)
  if last then return found, position(last) + tonumber(last[2][2]) end
  return found
end
