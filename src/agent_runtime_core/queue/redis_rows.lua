-- Rows of runs, and where they are to be found. A row is an array; RUN_ID and the other names of its cells are their
-- places. Times are texts, so that they come back as they were.
--
-- run:<id> is the row as JSON. Sorted sets say where rows are to be found: `runs` and `status:<status>` by order of
-- arrival, `ready:<agent>` in the order of claims, `due` by wall time, `lease:<agent>` by the end of the lease;
-- `lane:<key>` has the run that has a lane, `behind:<key>` those behind it, `inline` heads that somebody executes.

local LIVE = {pending = true, running = true, waiting = true}
local DIGITS = '0123456789ABCDEFGHJKMNPQRSTVWXYZ'
local MANY = 256

-- A place among those of equal score, by order of arrival.
local function in_order(row)
  return string.format('%016d:', row[N]) .. row[RUN_ID]
end

-- Where a row is to be found: four times a key, score and member, or three times false.
local function places(row)
  local found = {P .. 'status:' .. row[STATUS], row[N], row[RUN_ID], false, false, false, false, false, false, false}
  local mine, pending, running = row[ORIGIN] == '', row[STATUS] == 'pending', row[STATUS] == 'running'
  if row[DUE_AT] ~= '0' then
    found[4], found[5], found[6] = P .. 'due', row[DUE_AT], row[RUN_ID]
  elseif pending and mine and row[HELD] == 0 then
    found[4], found[5], found[6] = P .. 'ready:' .. row[AGENT], -row[PRIORITY], in_order(row)
  elseif running and mine then
    found[4], found[5], found[6] = P .. 'lease:' .. row[AGENT], row[LEASE_UNTIL], row[RUN_ID]
  end
  if row[LANE] ~= null and LIVE[row[STATUS]] then
    if row[HELD] == 0 then
      found[7], found[8], found[9] = P .. 'lane:' .. row[LANE], row[N], row[RUN_ID]
      if not mine and (pending or running) then
        found[10], found[11], found[12] = P .. 'inline', row[LEASE_UNTIL], row[RUN_ID]
      end
    elseif row[HELD] == BEHIND and pending and row[DUE_AT] == '0' then
      found[7], found[8], found[9] = P .. 'behind:' .. row[LANE], -row[PRIORITY], in_order(row)
    end
  end
  return found
end

local function get(run)
  tx.rows = tx.rows or {}
  local known = tx.rows[run]
  if known == nil then
    local stored = call('GET', P .. 'run:' .. run)
    known = stored and {row = cjson.decode(stored), json = stored}
    if known then known.was = places(known.row) end
    tx.rows[run] = known
  end
  return known and known.row or nil
end

-- To be called with each row that is changed.
local function changed(row)
  local known = tx.rows[row[RUN_ID]]
  known.json, known.dirty = nil, true
  return row
end

local function told(row)
  local known = tx.rows[row[RUN_ID]]
  known.json = known.json or cjson.encode(row)
  return raw(known.json)
end

local function all_told(rows)
  local found = {}
  for i, row in ipairs(rows) do found[i] = told(row).raw end
  return raw('[' .. table.concat(found, ',') .. ']')
end

local function by_key(key)
  local run = tx.keys and tx.keys[key] or call('HGET', P .. 'idem', key)
  return run and get(run)
end

local function add(row)
  local run = row[RUN_ID]
  row[N] = call('INCR', P .. 'n')
  tx.rows[run] = {row = row, was = {}, dirty = true}
  if row[IDEM_KEY] ~= null then
    tx.keys = tx.keys or {}
    tx.keys[row[IDEM_KEY]] = run
    write('HSET', P .. 'idem', row[IDEM_KEY], run)
  end
  if row[PARENT_ID] ~= null then write('ZADD', P .. 'children:' .. row[PARENT_ID], row[N], run) end
  write('ZADD', P .. 'runs', row[N], run)
  write('SADD', P .. 'agents', row[AGENT])
  return row
end

local function drop(row)
  local run = row[RUN_ID]
  write('DEL', P .. 'run:' .. run, P .. 'mail:' .. run, P .. 'messages:' .. run, P .. 'children:' .. run)
  write('ZREM', P .. 'runs', run)
  local was = tx.rows[run].was
  for i = 1, 10, 3 do
    if was[i] then write('ZREM', was[i], was[i + 2]) end
  end
  if row[IDEM_KEY] ~= null then write('HDEL', P .. 'idem', row[IDEM_KEY]) end
  if row[PARENT_ID] ~= null then write('ZREM', P .. 'children:' .. row[PARENT_ID], run) end
  tx.rows[run] = false
end

local function keep(known)
  local was, is = known.was, places(known.row)
  write('SET', P .. 'run:' .. known.row[RUN_ID], told(known.row).raw)
  for i = 1, 10, 3 do
    local same = was[i] == is[i] and was[i + 2] == is[i + 2]
    if was[i] and not same then write('ZREM', was[i], was[i + 2]) end
    if is[i] and not (same and was[i + 1] == is[i + 1]) then write('ZADD', is[i], is[i + 1], is[i + 2]) end
  end
end

flushes[#flushes + 1] = function()
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty then keep(known) end
  end
end
