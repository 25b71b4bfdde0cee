-- The journal of a run is a stream. The id of a record is "<first event number>-<position + 1>". Both numbers grow
-- together, so a record is found by either. `head:<run>` stores the last position and the number of the next event.

local function head(run)
  local found = tx.heads and tx.heads[run]
  if not found then
    local key = P .. 'head:' .. run
    local stored = call('HMGET', key, 'seq', 'ev')
    fitting[key] = true
    found = {seq = tonumber(stored[1] or -1), ev = tonumber(stored[2] or 0)}
    tx.heads = tx.heads or {}
    tx.heads[run] = found
  end
  return found
end

-- Reserves `count` event numbers of the run, and returns the first one.
local function take_events(run, count)
  local place = head(run)
  local first = place.ev
  place.ev, place.moved = first + count, true
  return first
end

flushes[#flushes + 1] = function()
  for run, place in pairs(tx.heads or {}) do
    if place.moved then write('HSET', P .. 'head:' .. run, 'seq', text(place.seq), 'ev', text(place.ev)) end
  end
end

ops['journal.append'] = function(run, seq, nev, claim, kind, key, body)
  local place = head(run)
  if seq < 0 then
    local there = ops['journal.again'](run, claim, kind, body)
    if there then return there end
    seq = place.seq + 1
  elseif seq <= place.seq then
    return applied['journal.append'](run, seq, nev, claim, kind, key)
  end
  local ev = take_events(run, nev)
  place.seq = seq
  write('XADD', P .. 'journal:' .. run, string.format('%d-%d', ev, seq + 1), 'n', text(nev), 'r', body)
  if nev > 0 then ring('events') end
  return seq
end
