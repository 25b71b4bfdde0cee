-- The published events of a run are a stream with the ids "<event number + 1>-0". `ids:<run>` is a hash of the event
-- numbers by event id.

local function known(run, id)
  local ids = tx.ids and tx.ids[run]
  if ids and ids[id] then return ids[id] end
  local number = call('HGET', P .. 'ids:' .. run, id)
  return number and tonumber(number)
end

ops['events.publish'] = function(run, rows)
  local numbers = {}
  tx.ids = tx.ids or {}
  tx.ids[run] = tx.ids[run] or {}
  for i, row in ipairs(rows) do
    local id, body = row[1], row[2]
    local number = known(run, id)
    if not number then
      number = take_events(run, 1)
      tx.ids[run][id] = number
      write('XADD', P .. 'events:' .. run, string.format('%d-0', number + 1), 'r', body)
      write('HSET', P .. 'ids:' .. run, id, text(number))
      ring('events')
    end
    numbers[i] = number
  end
  return numbers
end
