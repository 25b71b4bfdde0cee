-- What is asked of a journal, and what befalls it seldom.

local function position(entry)
  local ev, seq = string.match(entry[1], '(%d+)-(%d+)')
  return tonumber(ev), tonumber(seq) - 1
end

-- Calls see(entry, ev, seq) from the last record back, until it returns something.
local function backwards(run, from, see)
  local last = from
  while true do
    local page = call('XREVRANGE', P .. 'journal:' .. run, last, '-', 'COUNT', 64)
    for _, entry in ipairs(page) do
      local found = see(entry, position(entry))
      if found ~= nil then return found end
    end
    if #page < 64 then return nil end
    last = '(' .. page[#page][1]
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

-- The position of this end of a generation, under no claim, where it is the last one there.
ops['journal.again'] = function(run, claim, kind, body)
  if kind ~= 'ended' or claim ~= '' then return nil end
  return backwards(run, '+', function(entry, _, at)
    if is_end(entry) then
      local there = cjson.decode(entry[2][4])
      return there[5] == '' and there[4] == cjson.decode(body)[4] and at
    end
  end)
end

-- Deletes one of a run's two streams, and its head with the last of them; both may go in one commit.
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

-- JSON [first event number, position, number of events, the rest as it was written].
local function record(entry, ev, seq)
  return '[' .. text(ev) .. ',' .. text(seq) .. ',' .. entry[2][2] .. ',' .. entry[2][4] .. ']'
end

-- A page of records after the one with that id, and the id to go on from.
ops['journal.records'] = function(run, after, limit)
  local page = call('XRANGE', P .. 'journal:' .. run, after, '+', 'COUNT', limit)
  local found = {}
  for i, entry in ipairs(page) do found[i] = record(entry, position(entry)) end
  local more = #page == limit and '"(' .. page[#page][1] .. '"' or 'null'
  return raw('[' .. more .. ',[' .. table.concat(found, ',') .. ']]')
end

ops['journal.ending'] = function(run)
  local found = backwards(run, '+', function(entry, ev, seq)
    if is_end(entry) then return record(entry, ev, seq) end
  end)
  return raw(found or 'null')
end

-- Records that stand for events at or after `since`.
local function boundaries(run, since, limit)
  local first = backwards(run, string.format('%d', since) .. '-18446744073709551615', function(entry, ev)
    if entry[2][2] ~= '0' then return entry[1] end
  end)
  local found, from = {}, first or '-'
  while #found < limit do
    local page = call('XRANGE', P .. 'journal:' .. run, from, '+', 'COUNT', limit)
    for _, entry in ipairs(page) do
      local ev, seq = position(entry)
      if entry[2][2] ~= '0' and ev + tonumber(entry[2][2]) > since and #found < limit then
        found[#found + 1] = record(entry, ev, seq)
      end
    end
    if #page < limit then break end
    from = '(' .. page[#page][1]
  end
  return found
end
