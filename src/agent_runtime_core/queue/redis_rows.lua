-- Rows of runs, and where they are to be found. A row is an array; RUN_ID and the other names of its cells are their
-- places. Times are texts, so that they come back as they were.
--
-- run:<id> is the row as JSON. Sorted sets say where rows are to be found: `runs` and `status:<status>` by order of
-- arrival, `ready:<agent>` in the order of claims, `due` by wall time, `lease:<agent>` by the end of the lease;
-- `due:<digits>` has those of `due` whose priority is above 0 and has that many binary digits, and `dues` their numbers;
-- `lane:<key>` has the run that has a lane, `behind:<key>` those behind it, `inline` heads that somebody executes.

local LIVE = {pending = true, running = true, waiting = true}
local DIGITS = '0123456789ABCDEFGHJKMNPQRSTVWXYZ'
local MANY, MUCH = 256, 1000000  -- rows, and characters of them, that are put right in one go

-- A place among those of equal score, by order of arrival.
local function in_order(row)
  return string.format('%016d:', row[N]) .. row[RUN_ID]
end

-- Key, score and member of where a row of that state is looked for, or nothing.
local function place(row, status, due_at, held, lease_until, origin)
  if due_at ~= '0' then return P .. 'due', due_at, row[RUN_ID] end
  if origin ~= '' then return end
  if status == 'running' then return P .. 'lease:' .. row[AGENT], lease_until, row[RUN_ID] end
  if status == 'pending' and held == 0 then return P .. 'ready:' .. row[AGENT], -row[PRIORITY], in_order(row) end
end

local function digits(priority)
  local _, bits = math.frexp(priority)
  return bits
end

-- The same beside others of about its priority.
local function place_by_priority(row, _, due_at)
  if due_at ~= '0' and row[PRIORITY] > 0 then return P .. 'due:' .. digits(row[PRIORITY]), due_at, row[RUN_ID] end
end

-- The same for its lane, and for inline heads of lanes.
local function place_in_lane(row, status, due_at, held)
  if row[LANE] == null or not LIVE[status] then return end
  if held == 0 then return P .. 'lane:' .. row[LANE], row[N], row[RUN_ID] end
  if held == BEHIND and status == 'pending' and due_at == '0' then
    return P .. 'behind:' .. row[LANE], -row[PRIORITY], in_order(row)
  end
end

local function place_inline(row, status, _, held, lease_until, origin)
  if row[LANE] == null or held ~= 0 or origin == '' then return end
  if status == 'pending' or status == 'running' then return P .. 'inline', lease_until, row[RUN_ID] end
end

local function get(run)
  tx.rows = tx.rows or {}
  local known = tx.rows[run]
  if known == nil then
    local stored = call('GET', P .. 'run:' .. run)
    if stored then
      local row = cjson.decode(stored)
      known = {row = row, json = stored, was = {row[STATUS], row[DUE_AT], row[HELD], row[LEASE_UNTIL], row[ORIGIN]}}
      tx.rows[run] = known
    end
  end
  return known and known.row or nil
end

-- The row that a member of a sorted set names. One whose row is gone, which no commit of ours leaves there, is taken
-- away: it would stand in the way of the others for ever.
local function named(key, member, run)
  local row = get(run)
  if not row then write('ZREM', key, member) end
  return row
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
  tx.rows[run] = {row = row, dirty = true}
  if row[IDEM_KEY] ~= null then
    tx.keys = tx.keys or {}
    tx.keys[row[IDEM_KEY]] = run
    write('HSET', P .. 'idem', row[IDEM_KEY], run)
  end
  if row[PARENT_ID] ~= null then write('ZADD', P .. 'children:' .. row[PARENT_ID], row[N], run) end
  if row[PRIORITY] > 0 then write('ZADD', P .. 'dues', digits(row[PRIORITY]), digits(row[PRIORITY])) end
  write('ZADD', P .. 'runs', row[N], run)
  write('SADD', P .. 'agents', row[AGENT])
  return row
end

local function move(row, was, where)
  local old, old_score, old_member
  if was then old, old_score, old_member = where(row, unpack(was)) end
  local key, score, member = where(row, row[STATUS], row[DUE_AT], row[HELD], row[LEASE_UNTIL], row[ORIGIN])
  local same = old == key and old_member == member
  if old and not same then write('ZREM', old, old_member) end
  if key and not (same and old_score == score) then write('ZADD', key, score, member) end
end

local function drop(row)
  local run, was = row[RUN_ID], tx.rows[row[RUN_ID]].was
  write('DEL', P .. 'run:' .. run, P .. 'mail:' .. run, P .. 'messages:' .. run)
  write('ZREM', P .. 'runs', run)
  if was then
    write('ZREM', P .. 'status:' .. was[1], run)
    for _, where in ipairs({place, place_by_priority, place_in_lane, place_inline}) do
      local key, _, member = where(row, unpack(was))
      if key then write('ZREM', key, member) end
    end
  end
  if row[IDEM_KEY] ~= null then write('HDEL', P .. 'idem', row[IDEM_KEY]) end
  if row[PARENT_ID] ~= null then write('ZREM', P .. 'children:' .. row[PARENT_ID], run) end
  tx.rows[run] = false
end

local function keep(known)
  local row, was = known.row, known.was
  write('SET', P .. 'run:' .. row[RUN_ID], told(row).raw)
  if not was or was[1] ~= row[STATUS] then
    if was then write('ZREM', P .. 'status:' .. was[1], row[RUN_ID]) end
    write('ZADD', P .. 'status:' .. row[STATUS], row[N], row[RUN_ID])
  end
  move(row, was, place)
  if row[PRIORITY] > 0 then move(row, was, place_by_priority) end
  if row[LANE] ~= null then
    move(row, was, place_in_lane)
    move(row, was, place_inline)
  end
end

flushes[#flushes + 1] = function()
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty then keep(known) end
  end
end
