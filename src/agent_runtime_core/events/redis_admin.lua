-- Reads of published events, and their rare operations.

applied['events.publish'] = function(run, rows)
  local numbers = {}
  for i, row in ipairs(rows) do
    numbers[i] = known(run, row[1])
    if not numbers[i] then not_applied() end
  end
  return numbers
end

ops['events.delete'] = function(run)
  write('DEL', P .. 'ids:' .. run)
  forget(run, 'events:', 'journal:')
  return null
end

ops['events.rewrite'] = function(run, changes)
  return rewrite_stream(P .. 'events:' .. run, changes)
end

-- Stores events of another store, {sequence number, id, body}, unless they are stored.
ops['events.copy'] = function(run, events)
  for _, event in ipairs(events) do
    local number, id, body = unpack(event)
    if not known(run, id) then
      write('XADD', P .. 'events:' .. run, string.format('%d-0', number + 1), 'r', body)
      write('HSET', P .. 'ids:' .. run, id, text(number))
      keep_head(run, -1, number + 1)
    end
  end
  return null
end

-- Deletes the published events before that number, and their ids. The last event of the run stays.
ops['events.trim'] = function(run, number)
  local key, gone = P .. 'events:' .. run, 0
  local last = call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if not last then return 0 end
  local first_kept = string.format('%d-0', math.min(number, position(last) - 1) + 1)
  for _, entry in ipairs(call('XRANGE', key, '-', '(' .. first_kept)) do
    write('HDEL', P .. 'ids:' .. run, cjson.decode(entry[2][2])[4])
    gone = gone + 1
  end
  if gone > 0 then write('XTRIM', key, 'MINID', first_kept) end
  return gone
end

-- The reports of readers are a hash that expires soon after the last one: "<sequence> <server time>" by reader.

ops['events.report'] = function(run, reader, sequence)
  local key = P .. 'readers:' .. run
  if sequence == null then
    write('HDEL', key, reader)
  else
    write('HSET', key, reader, text(sequence) .. ' ' .. text(now()))
    write('PEXPIRE', key, 60000)
  end
  return null
end

ops['events.readers'] = function(run, fresh)
  local found = {}
  local stored = call('HGETALL', P .. 'readers:' .. run)
  for i = 1, #stored, 2 do
    local sequence, at = string.match(stored[i + 1], '^(-?%d+) (.+)$')
    if sequence and now() - tonumber(at) <= fresh then found[#found + 1] = {stored[i], sequence} end
  end
  return found
end

ops['events.heads'] = function(runs)
  local found = {}
  for i, run in ipairs(runs) do found[i] = head(run).ev end
  return found
end

-- Returns [`since` for the next call, [[number, body], ...], [record, ...]] as JSON: published events and records from
-- `since` on, of each at most `limit` and no more after `enough` characters. If there may be more, only those before the
-- next `since` are returned.
ops['events.rows'] = function(run, since, limit, enough)
  local stored = {}
  local records, to = boundaries(run, since, limit, enough)
  local last = entries(P .. 'events:' .. run, string.format('%d', since + 1), limit, function(entry)
    local number = position(entry) - 1
    stored[#stored + 1] = {number, '[' .. text(number) .. ',' .. entry[2][2] .. ']'}
  end, enough)
  if last then to = math.min(to or math.huge, (position(last))) end
  local function json(rows)
    local found = {}
    for _, row in ipairs(rows) do
      if not to or row[1] < to then found[#found + 1] = row[2] end
    end
    return '[' .. table.concat(found, ',') .. ']'
  end
  return raw('[' .. (to and text(to) or 'null') .. ',' .. json(stored) .. ',' .. json(records) .. ']')
end
