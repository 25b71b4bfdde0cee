-- Rows of runs, and their indexes. A row is an array. RUN_ID and the other names are the indexes of its fields;
-- redis.py replaces them by numbers. Times are strings, so that they are read back without a rounding error.
--
-- run:<id> is the row as JSON. These sorted sets are the indexes:
--
-- runs, status:<status>  all runs, and the runs of a status, by order of arrival
-- ready:<agent>          runs that may be claimed, in the order of claims
-- due                    delayed and waiting runs by the wall time at which they become ready
-- due:<digits>           those of `due` with a priority above 0 of that many binary digits; `dues` has these numbers
-- lease:<agent>          running runs by the end of their lease
-- lane:<key>             the active run of a concurrency key; lane is the stored name of a concurrency key
-- behind:<key>           the runs that wait for the active one, in the order of claims
-- inline                 active inline runs with a concurrency key, by the end of their lease

local LIVE = {pending = true, running = true, waiting = true}
local DIGITS = '0123456789ABCDEFGHJKMNPQRSTVWXYZ'
local MANY, MUCH = 256, 1000000  -- most rows, and characters of them, that one claim makes ready or expires

-- Returns a member of a sorted set. Members of equal score are in order of arrival.
local function in_order(row)
  return string.format('%016d:', row[N]) .. row[RUN_ID]
end

-- Returns key, score and member of the index entry of a row in that state, or nothing.
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

-- The same for the delayed runs of similar priority.
local function place_by_priority(row, _, due_at)
  if due_at ~= '0' and row[PRIORITY] > 0 then return P .. 'due:' .. digits(row[PRIORITY]), due_at, row[RUN_ID] end
end

-- The same for the runs of a concurrency key, and below for its active inline run.
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

-- Returns the row of a member of a sorted set. A member without a row is removed, or it would block the members after
-- it forever. Commits of this library leave no such member.
local function named(key, member, run)
  local row = get(run)
  if not row then write('ZREM', key, member) end
  return row
end

-- Marks a row as changed, so that the commit stores it.
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
