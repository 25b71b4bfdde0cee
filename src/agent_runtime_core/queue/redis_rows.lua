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
-- lane:<key>             the active runs of a group: of a concurrency key (its stored name is lane) and a tenant
-- behind:<key>           the runs that wait for the active runs, in the order of claims
-- limited:<rate>         runs that a rate limit delays, in the order of claims; the key ends with NUL and the agent
-- turns:<agent>          ready runs with a turn, in the order of <turn> NUL and arrival; the key ends with NUL and the
--                        priority
-- shared                 a hash of states that all processes share by name; see `lines` in claims
-- present                a hash of times: when a process last claimed or renewed leases; see `present` and
--                        `follow_clock` in claims
-- inline                 active inline runs with a concurrency key, by the end of their lease
--
-- These list runs by the time at which they were created; a member begins with the order of arrival and the run id:
--
-- created                all runs; a member also has the run key
-- by:conversation:<id>, by:lane:<key>, by:parent:<run id>
-- state:<status>:<agent>, reason:<first word>, reason:<first two words>, waiting:<first word of the reason>, retrying,
-- asking, in_doubt
--
-- A <key> of a tenant, an idempotency key and the first three of these, is followed by NUL and the tenant, which no name
-- contains. So are state:<status>:<agent> and waiting:<first word>, which list a tenant's runs a second time, and due.
--
-- names has the run id and the run key of each run, in the order of these strings. `words` is a set of the first words
-- of the reasons of waiting runs. `lists` exists once all runs are in these lists, as no older release keeps them.

local LIVE = {pending = true, running = true, waiting = true}
local DIGITS = '0123456789ABCDEFGHJKMNPQRSTVWXYZ'
local MANY, MUCH = 256, 1000000  -- most rows, and characters of them, that one claim makes ready or expires

-- Returns a member of a sorted set. Members of equal score are in order of arrival.
local function in_order(row)
  return string.format('%016d:', row[N]) .. row[RUN_ID]
end

-- Returns a name as a tenant's.
local function owned(name, tenant)
  return tenant == '' and name or name .. '\0' .. tenant
end

local function group_of(row)
  return owned(row[LANE], row[TENANT])
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

-- The same for the runs that a rate limit delays.
local function place_by_rate(row, status, due_at, _, _, _, reason)
  if row[RATE] == null or reason ~= RATE_LIMITED or status ~= 'pending' or due_at == '0' then return end
  return P .. 'limited:' .. row[RATE] .. '\0' .. row[AGENT], -row[PRIORITY], in_order(row)
end

-- The same for the ready runs that take turns.
local function place_by_turn(row, status, due_at, held, _, origin)
  if row[TURN] == null or status ~= 'pending' or due_at ~= '0' or held ~= 0 or origin ~= '' then return end
  return P .. 'turns:' .. row[AGENT] .. '\0' .. row[PRIORITY], 0, row[TURN] .. '\0' .. in_order(row)
end

-- The same for the runs of a concurrency key, and below for its active inline run.
local function place_in_lane(row, status, due_at, held)
  if row[LANE] == null or not LIVE[status] then return end
  if held == 0 then return P .. 'lane:' .. group_of(row), row[N], row[RUN_ID] end
  if held == BEHIND and status == 'pending' and due_at == '0' then
    return P .. 'behind:' .. group_of(row), -row[PRIORITY], in_order(row)
  end
end

local function place_inline(row, status, _, held, lease_until, origin)
  if row[LANE] == null or held ~= 0 or origin == '' then return end
  if status == 'pending' or status == 'running' then return P .. 'inline', lease_until, row[RUN_ID] end
end

-- Calls each(key, score, member) for the lists that a row is in from the beginning.
local function fixed_lists(row, each)
  local member, at = in_order(row), row[CREATED_AT]
  local named = '\0' .. at .. '\0' .. member
  each(P .. 'names', 0, row[RUN_ID] .. named)
  if row[RUN_KEY] ~= null then
    each(P .. 'names', 0, row[RUN_KEY] .. named)
    each(P .. 'created', at, member .. ' ' .. row[RUN_KEY])
  else
    each(P .. 'created', at, member)
  end
  if row[CONVERSATION] ~= null then each(P .. 'by:conversation:' .. row[CONVERSATION], at, member) end
  if row[LANE] ~= null then each(P .. 'by:lane:' .. row[LANE], at, member) end
  if row[PARENT_ID] ~= null then each(P .. 'by:parent:' .. row[PARENT_ID], at, member) end
end

-- Returns the keys of the lists that a row in that state is in.
local function lists(row, status, due_at, _, _, _, reason, failures, questions)
  local found = {P .. 'state:' .. status .. ':' .. row[AGENT]}
  if reason ~= '' or status == 'waiting' then
    local word = string.match(reason, '^[^ ]*')
    if reason ~= '' then found[2] = P .. 'reason:' .. word end
    if #word < #reason then found[3] = P .. 'reason:' .. string.match(reason, '^[^ ]* [^ ]*') end
    if status == 'waiting' then found[#found + 1] = P .. 'waiting:' .. word end
  end
  if row[TENANT] ~= '' then
    found[#found + 1] = owned(found[1], row[TENANT])
    if due_at ~= '0' then found[#found + 1] = owned(P .. 'due', row[TENANT]) end
    if status == 'waiting' then
      found[#found + 1] = owned(P .. 'waiting:' .. string.match(reason, '^[^ ]*'), row[TENANT])
    end
  end
  if LIVE[status] then
    if failures > 0 then found[#found + 1] = P .. 'retrying' end
    if questions ~= '' then
      found[#found + 1] = P .. 'asking'
      if string.find(questions, ' ' .. IN_DOUBT, 1, true) then found[#found + 1] = P .. 'in_doubt' end
    end
  end
  return found
end

-- Returns whether a row in that state is in one list only. Most rows always are.
local function is_plain(row, status, _, _, _, _, reason, failures, questions)
  return reason == '' and failures == 0 and questions == '' and status ~= 'waiting' and row[TENANT] == ''
end

-- Returns what of a row decides in which lists and indexes it is.
local function state_of(row)
  return {
    row[STATUS], row[DUE_AT], row[HELD], row[LEASE_UNTIL], row[ORIGIN], row[REASON], row[FAILURES], row[QUESTIONS],
  }
end

-- Moves a row from the lists of the state `was` to those of its state now.
local function relist(row, was)
  local status, reason, member = row[STATUS], row[REASON], in_order(row)
  if was and was[1] == status and was[6] == reason and was[7] == row[FAILURES] and was[8] == row[QUESTIONS]
    and (row[TENANT] == '' or was[2] == row[DUE_AT]) then
    return
  end
  local is = state_of(row)
  if is_plain(row, unpack(is)) and (not was or is_plain(row, unpack(was))) then
    if was then write('ZREM', P .. 'state:' .. was[1] .. ':' .. row[AGENT], member) end
    write('ZADD', P .. 'state:' .. status .. ':' .. row[AGENT], row[CREATED_AT], member)
    return
  end
  local stale = {}
  for _, key in ipairs(was and lists(row, unpack(was)) or {}) do stale[key] = true end
  for _, key in ipairs(lists(row, unpack(is))) do
    if not stale[key] then write('ZADD', key, row[CREATED_AT], member) end
    stale[key] = nil
  end
  for key in pairs(stale) do write('ZREM', key, member) end
  if status == 'waiting' then
    local word = string.match(reason, '^[^ ]*')
    write('SADD', P .. 'words', word)
    if row[TENANT] ~= '' then write('SADD', owned(P .. 'words', row[TENANT]), word) end
  end
end

local function get(run)
  tx.rows = tx.rows or {}
  local known = tx.rows[run]
  if known == nil then
    local stored = call('GET', P .. 'run:' .. run)
    if stored then
      local row = cjson.decode(stored)
      local old = row[QUESTIONS] == nil  -- of an older release, so it is in no list
      if old then row[CONVERSATION], row[QUESTIONS] = null, '' end
      row[TENANT], row[CONCURRENCY_LIMIT] = row[TENANT] or '', row[CONCURRENCY_LIMIT] or 1
      row[RATE], row[TURN] = row[RATE] or null, row[TURN] or null
      known = {row = row, json = stored, unlisted = old, was = state_of(row)}
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

local function by_key(key, tenant)
  key = owned(key, tenant)
  local run = tx.keys and tx.keys[key] or call('HGET', P .. 'idem', key)
  return run and get(run)
end

-- Stores the keys by which a row is found.
local function register(row)
  if row[IDEM_KEY] ~= null then
    local key = owned(row[IDEM_KEY], row[TENANT])
    tx.keys = tx.keys or {}
    tx.keys[key] = row[RUN_ID]
    write('HSET', P .. 'idem', key, row[RUN_ID])
  end
  tx.agents = tx.agents or {}
  tx.agents[row[AGENT]] = true
  write('SADD', P .. 'agents', row[AGENT])
  if row[TENANT] ~= '' then write('SADD', owned(P .. 'agents', row[TENANT]), row[AGENT]) end
end

local function add_copied(row)
  local run = row[RUN_ID]
  tx.rows[run] = {row = row, dirty = true, unlisted = true}
  if row[N] == 1 then write('SET', P .. 'lists', '1') end
  register(row)
  if row[PARENT_ID] ~= null then write('ZADD', P .. 'children:' .. row[PARENT_ID], row[N], run) end
  if row[PRIORITY] > 0 then write('ZADD', P .. 'dues', digits(row[PRIORITY]), digits(row[PRIORITY])) end
  write('ZADD', P .. 'runs', row[N], run)
  return row
end

local function add(row)
  row[N] = call('INCR', P .. 'n')
  return add_copied(row)
end

local function move(row, was, where)
  local old, old_score, old_member
  if was then old, old_score, old_member = where(row, unpack(was)) end
  local key, score, member = where(row, row[STATUS], row[DUE_AT], row[HELD], row[LEASE_UNTIL], row[ORIGIN], row[REASON])
  local same = old == key and old_member == member
  if old and not same then write('ZREM', old, old_member) end
  if key and not (same and old_score == score) then write('ZADD', key, score, member) end
end

-- Removes a row from what depends on its state and its tenant.
local function unregister(row)
  local was = tx.rows[row[RUN_ID]].was
  if was then
    write('ZREM', P .. 'status:' .. was[1], row[RUN_ID])
    for _, where in ipairs({place, place_by_priority, place_by_rate, place_by_turn, place_in_lane, place_inline}) do
      local key, _, member = where(row, unpack(was))
      if key then write('ZREM', key, member) end
    end
    for _, key in ipairs(lists(row, unpack(was))) do write('ZREM', key, in_order(row)) end
  end
  if row[IDEM_KEY] ~= null then write('HDEL', P .. 'idem', owned(row[IDEM_KEY], row[TENANT])) end
end

local function drop(row)
  local run = row[RUN_ID]
  write('DEL', P .. 'run:' .. run, P .. 'mail:' .. run, P .. 'messages:' .. run)
  write('ZREM', P .. 'runs', run)
  unregister(row)
  if row[PARENT_ID] ~= null then write('ZREM', P .. 'children:' .. row[PARENT_ID], run) end
  fixed_lists(row, function(key, _, member) write('ZREM', key, member) end)
  tx.rows[run] = false
end

-- Returns the conversation that the input of a row of an older release names; see conversation_of in base.py.
local function conversation_of(input)
  local decoded, value = pcall(cjson.decode, input)
  local id = decoded and value.conversation_id
  if type(id) == 'table' and id['$'] == 'uuid' then id = id.v end
  if type(id) ~= 'string' or id == '' then return null end
  local is_uuid = #id == 36 and string.find(id, '^%x+%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x+$') == 1
  return is_uuid and string.lower(id) or id
end

local function keep(known)
  local row, was = known.row, known.was
  if known.unlisted then
    if was and row[CONVERSATION] == null then row[CONVERSATION] = conversation_of(row[INPUT]) end
    fixed_lists(row, function(key, score, member) write('ZADD', key, score, member) end)
  end
  relist(row, not known.unlisted and was or nil)
  if not was or was[1] ~= row[STATUS] then
    if was then write('ZREM', P .. 'status:' .. was[1], row[RUN_ID]) end
    write('ZADD', P .. 'status:' .. row[STATUS], row[N], row[RUN_ID])
  end
  move(row, was, place)
  if row[PRIORITY] > 0 then move(row, was, place_by_priority) end
  if row[RATE] ~= null then move(row, was, place_by_rate) end
  if row[TURN] ~= null then move(row, was, place_by_turn) end
  if row[LANE] ~= null then
    move(row, was, place_in_lane)
    move(row, was, place_inline)
  end
  write('SET', P .. 'run:' .. row[RUN_ID], told(row).raw)  -- last: the writes before can be undone
end

flushes[#flushes + 1] = function()
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty then keep(known) end
  end
end
