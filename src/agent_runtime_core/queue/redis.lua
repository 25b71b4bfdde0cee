-- The transitions of a run's row, as `rows.py` decides them elsewhere. A row is an array; RUN_ID and the other names of
-- its cells are their places. Times are texts, so that they come back as they were.
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

-- lanes: of the live runs of one, at most one, its head, has HELD 0

local function is_head(row, lane)
  return row[LANE] == lane and LIVE[row[STATUS]] and row[HELD] == 0
end

-- The head of a lane, as this commit leaves it; not the row `except`.
local function head_of(lane, except)
  for _, run in ipairs(call('ZRANGE', P .. 'lane:' .. lane, 0, -1)) do get(run) end
  for _, known in pairs(tx.rows) do
    if known and known.row ~= except and is_head(known.row, lane) then return known.row end
  end
end

local function before(a, b)
  if a[PRIORITY] ~= b[PRIORITY] then return a[PRIORITY] > b[PRIORITY] end
  return a[N] < b[N]
end

local function first_behind(lane)
  local first
  for _, member in ipairs(call('ZRANGE', P .. 'behind:' .. lane, 0, 7)) do get(string.sub(member, 18)) end
  for _, known in pairs(tx.rows) do
    local row = known and known.row
    if row and row[LANE] == lane and row[STATUS] == 'pending' and row[HELD] == BEHIND and row[DUE_AT] == '0'
      and (not first or before(row, first)) then
      first = row
    end
  end
  return first
end

-- Lets the next run of a lane go, if no other has it.
local function release(lane)
  if head_of(lane) then return end
  local row = first_behind(lane)
  if row then
    row[HELD] = 0
    changed(row)
    ring('work')
  end
end

-- A pending row as it comes into its lane.
local function enter(row)
  if row[LANE] == null then return row end
  if row[ORIGIN] ~= '' then
    row[HELD] = ASIDE
  else
    row[HELD] = (row[DUE_AT] ~= '0' or head_of(row[LANE], row)) and BEHIND or 0
  end
  return row
end

-- Rings for a row that was changed, and lets the next one of its lane go.
local function save(row)
  ring(LIVE[row[STATUS]] and 'work' or 'done')
  changed(row)
  if row[LANE] ~= null and (row[HELD] ~= 0 or not LIVE[row[STATUS]]) then release(row[LANE]) end
  return row
end

local function expect(run, statuses)
  local row = get(run)
  for _, status in ipairs(statuses) do
    if row and row[STATUS] == status then return row end
  end
  refuse('MOVED')
end

-- claiming

-- A ticket above the last claim's: where the clock went back, the time after that one's.
local function above(ticket, last)
  if ticket > last then return ticket end
  local digits = {string.byte(last, 1, 10)}
  for i = 10, 1, -1 do
    local at = string.find(DIGITS, string.char(digits[i]), 1, true)
    if at < 32 then
      digits[i] = string.byte(DIGITS, at + 1)
      break
    end
    digits[i] = string.byte('0')
  end
  return string.char(unpack(digits)) .. string.sub(ticket, 11)
end

-- The ClaimRequest, in this server's time.
local function wanted(cells)
  local since = by_server and now or 0
  return {
    tickets = cells[1], worker = cells[2], holder = cells[3], lease_until = text(since + cells[4]),
    lease_now = since + cells[5], wall = text(by_server and now or cells[6]),
    agents = cells[7] ~= null and cells[7] or call('SMEMBERS', P .. 'agents'), light = cells[8],
  }
end

local function claim(row, ticket, want)
  if row[STATUS] == 'running' then
    row[CRASHES], row[STALLS], row[PARKED] = row[CRASHES] + 1, row[STALLS] + 1, 0
  end
  row[STATUS], row[CLAIM_ID] = 'running', above(ticket, row[CLAIM_ID])
  row[WORKER], row[HOLDER], row[LEASE_UNTIL] = want.worker, want.holder, want.lease_until
  row[CLAIMED_AT], row[UPDATED_AT], row[DUE_AT], row[HELD] = want.wall, want.wall, '0', 0
  if row[STARTED_AT] == null then row[STARTED_AT] = want.wall end
  fence(row[RUN_ID], row[CLAIM_ID])
  return changed(row)
end

-- Rows whose time has come are pending, whatever becomes of this commit: it is about to look for them. The lanes of
-- those that are behind in theirs.
local function promote(wall)
  local lanes = {}
  for _, run in ipairs(call('ZRANGEBYSCORE', P .. 'due', '-inf', wall, 'LIMIT', 0, MANY)) do
    if not (tx.rows and tx.rows[run]) then
      local row = get(run)
      row[STATUS], row[DUE_AT] = 'pending', '0'
      if row[HELD] == BEHIND then lanes[#lanes + 1] = row[LANE] end
      changed(row)
      local noted = tx.writes
      tx.writes = {}
      keep(tx.rows[run])
      perform(tx.writes)
      tx.writes = noted
      tx.rows[run] = nil
    end
  end
  return lanes
end

local function expired(want, limit)
  local found = {}
  for _, agent in ipairs(want.agents) do
    local runs = call('ZRANGEBYSCORE', P .. 'lease:' .. agent, '-inf', '(' .. text(want.lease_now), 'LIMIT', 0, MANY)
    for _, run in ipairs(runs) do
      local row = get(run)
      if #found < limit and row and row[STATUS] == 'running' and tonumber(row[LEASE_UNTIL]) < want.lease_now then
        found[#found + 1] = row
      end
    end
  end
  return found
end

-- Rows with a lane that somebody executes, and whose lease is over.
local function lapsed(want)
  local found = {}
  for _, run in ipairs(call('ZRANGEBYSCORE', P .. 'inline', '-inf', '(' .. text(want.lease_now), 'LIMIT', 0, MANY)) do
    local row = get(run)
    if row and row[ORIGIN] ~= '' and row[HELD] == 0 and (row[STATUS] == 'pending' or row[STATUS] == 'running') then
      found[#found + 1] = row
    end
  end
  return found
end

-- An inline run that its process let fall gets out of the way of its lane until somebody takes it again.
local function step_aside(row, want)
  if row[STATUS] == 'running' then
    fence(row[RUN_ID], nil)
    row[CRASHES], row[STALLS], row[PARKED] = row[CRASHES] + 1, row[STALLS] + 1, 0
  end
  row[STATUS], row[HELD], row[LEASE_UNTIL], row[UPDATED_AT] = 'pending', ASIDE, '0', want.wall
  save(row)
end

local function is_ready(row)
  return row[STATUS] == 'pending' and row[DUE_AT] == '0' and row[ORIGIN] == '' and row[HELD] == 0
end

-- The first ready rows of the wanted agents, as this commit leaves them.
local function ready(want, limit)
  local found, wanted_agent, seen = {}, {}, {}
  local function see(row)
    if row and not seen[row] and wanted_agent[row[AGENT]] and is_ready(row) then
      seen[row] = true
      found[#found + 1] = row
      return true
    end
  end
  for _, agent in ipairs(want.agents) do
    local left = limit
    wanted_agent[agent] = true
    -- A few more: this commit may have changed some.
    for _, member in ipairs(call('ZRANGE', P .. 'ready:' .. agent, 0, limit + 7)) do
      if left > 0 and see(get(string.sub(member, 18))) then left = left - 1 end
    end
  end
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty then see(known.row) end
  end
  table.sort(found, before)
  return found
end

ops['queue.claim'] = function(cells)
  local want, got = wanted(cells), {}
  local free = #want.tickets
  local function take(rows)
    for _, row in ipairs(rows) do
      if #got < free then got[#got + 1] = claim(row, want.tickets[#got + 1], want) end
    end
  end
  if not want.light then
    for _, lane in ipairs(promote(want.wall)) do release(lane) end
    local fallen = expired(want, free)
    for _, row in ipairs(lapsed(want)) do step_aside(row, want) end
    take(fallen)
  end
  if #got < free then take(ready(want, free - #got)) end
  return all_told(got)
end

applied['queue.claim'] = function()
  return {}
end

-- entering

local function there(row)
  local found = get(row[RUN_ID])
  if not found and row[IDEM_KEY] ~= null then found = by_key(row[IDEM_KEY]) end
  return found
end

ops['queue.insert'] = function(row)
  local found = there(row)
  if not found then
    found = add(enter(row))
    ring('work')
  end
  return told(found)
end

applied['queue.insert'] = function(row)
  local found = there(row)
  if not found then not_applied() end
  return told(found)
end

local function reopened(row, at)
  row[STATUS], row[GENERATION], row[FAILURES], row[CRASHES] = 'pending', row[GENERATION] + 1, 0, 0
  row[STALLS], row[MARK], row[PARKED], row[REASON], row[DUE_AT] = 0, -1, 0, '', '0'
  row[ENDED_AT], row[EXPIRES_AT], row[CANCEL_AT], row[OUTPUT], row[ERROR] = null, null, null, null, null
  row[UPDATED_AT] = at
  return changed(row)
end

local function answer(word, row)
  return raw('["' .. word .. '",' .. (row and told(row).raw or 'null') .. ']')
end

local function over(row, want)
  return tonumber(row[LEASE_UNTIL]) < want.lease_now
end

-- The run that keeps `row` from its lane; one that its own process let fall does not.
local function front(row, want)
  while row[LANE] ~= null do
    local first = head_of(row[LANE])
    if not first or first[RUN_ID] == row[RUN_ID] then return nil end
    if first[ORIGIN] == '' or first[STATUS] == 'waiting' or not over(first, want) then return first end
    step_aside(first, want)
  end
end

ops['queue.take'] = function(mine, insert, reopen, asked, wait)
  local want, ended = wanted(asked), false
  local row = insert and there(mine) or get(mine[RUN_ID])
  if not row then
    if not insert then return answer('unknown') end
  elseif row[RUN_ID] ~= mine[RUN_ID] or insert and row[DIGEST] ~= mine[DIGEST] then
    return answer('conflict', row)
  elseif row[STATUS] == 'running' and not over(row, want) then
    return answer('held', row)
  elseif not LIVE[row[STATUS]] then
    if row[STATUS] == 'succeeded' or not reopen then return answer('ended', row) end
    ended = true
  end
  local first = front(row or mine, want)
  if first and not wait then return answer('behind', first) end
  row = row or add(mine)
  if ended then
    reopened(row, want.wall)
    row[ORIGIN] = mine[ORIGIN]
  end
  if first then
    row[HELD], row[DUE_AT], row[HOLDER], row[LEASE_UNTIL] = BEHIND, '0', want.holder, text(want.lease_now + PLACE)
    if row[ORIGIN] ~= '' then row[ORIGIN] = mine[ORIGIN] end
    if ended then save(row) else changed(row) end
    return answer('behind', first)
  end
  row[ORIGIN] = mine[ORIGIN]
  return answer('claimed', claim(row, want.tickets[1], want))
end

-- under a claim

ops['queue.settle'] = function(run, claim_id, status, at, due_at, parked, reason, failures, crashes, stalls, mark,
  output, failure, cursor)
  local row = expect(run, {'running'})
  if row[CLAIM_ID] ~= claim_id or cursor >= 0 and cursor ~= row[MAIL_SEQ] then refuse('MOVED') end
  if row[CANCEL_AT] ~= null and (status == 'waiting' or status == 'pending') then
    -- Its next claim cancels it, so that is not put off; what waits is about to hear of it.
    if status == 'waiting' then refuse('MOVED') end
    due_at = '0'
  end
  row[STATUS], row[UPDATED_AT], row[DUE_AT], row[PARKED], row[REASON] = status, at, due_at, parked, reason
  row[FAILURES], row[CRASHES], row[STALLS], row[MARK] = failures, crashes, stalls, mark
  row[OUTPUT], row[ERROR] = output, failure
  row[ENDED_AT] = LIVE[status] and null or at
  if status == 'running' then return told(changed(row)) end
  fence(run, nil)
  row[LEASE_UNTIL] = '0'
  if status == 'pending' and row[ORIGIN] ~= '' then enter(row) end
  return told(save(row))
end

applied['queue.settle'] = function(run, claim_id, status, at)
  local row = get(run)
  if not row or row[CLAIM_ID] ~= claim_id or row[STATUS] ~= status or row[UPDATED_AT] ~= at then not_applied() end
  return told(row)
end

ops['queue.beat'] = function(claims, lease_until)
  local answers = {}
  for i, each in ipairs(claims) do
    local row = get(each[1])
    local held = row ~= nil and row[STATUS] == 'running' and row[CLAIM_ID] == each[2]
    if held then
      row[LEASE_UNTIL] = text((by_server and now or 0) + lease_until)
      changed(row)
    end
    answers[i] = {held, row ~= nil and row[CANCEL_AT] ~= null}
  end
  return answers
end

-- from outside

local function mailed(run, id)
  local seen = tx.messages and tx.messages[run .. ' ' .. id] or call('HGET', P .. 'messages:' .. run, id)
  return seen and tonumber(seen)
end

ops['queue.post'] = function(run, kind, name, payload, id, at)
  local row = get(run)
  if not row then return {'unknown', 0} end
  local was, seq = row[STATUS], mailed(run, id)
  if seq or not LIVE[was] then return {was, seq or 0} end
  seq = row[MAIL_SEQ] + 1
  tx.messages = tx.messages or {}
  tx.messages[run .. ' ' .. id] = seq
  write('RPUSH', P .. 'mail:' .. run, cjson.encode({kind, name, payload, id, at, seq}))
  write('HSET', P .. 'messages:' .. run, id, seq)
  row[MAIL_SEQ] = seq
  if kind == 'cancel' and row[CANCEL_AT] == null then
    -- No later claim runs its code: any worker may end it, should its own process be gone or let go of it.
    row[CANCEL_AT], row[ORIGIN] = at, ''
    if row[HELD] == ASIDE then enter(row) end
  end
  if was == 'waiting' then row[STATUS], row[DUE_AT] = 'pending', '0' end
  save(row)
  ring('mail')
  return {was, seq}
end

applied['queue.post'] = function(run, kind, name, payload, id)
  local row, seq = get(run), mailed(run, id)
  if row and LIVE[row[STATUS]] and not seq then not_applied() end
  return {row and row[STATUS] or 'unknown', seq or 0}
end

ops['queue.end'] = function(run, statuses, status, at, reason)
  local row = expect(run, statuses)
  fence(run, nil)
  ring('mail')
  row[STATUS], row[HELD], row[DUE_AT], row[REASON] = status, 0, '0', reason
  row[ENDED_AT], row[UPDATED_AT] = at, at
  return told(save(row))
end

ops['queue.reopen'] = function(run, statuses, at)
  local row = reopened(expect(run, statuses), at)
  row[ORIGIN] = ''
  return told(save(enter(row)))
end

ops['queue.delete'] = function(run)
  local row = get(run)
  if row then
    if LIVE[row[STATUS]] then refuse('MOVED') end
    drop(row)
    fence(run, nil)
  end
  return null
end

-- looking

ops['queue.row'] = function(run)
  local row = get(run)
  return row and told(row) or null
end

ops['queue.row_by_key'] = function(key)
  local row = by_key(key)
  return row and told(row) or null
end

-- Rows of the next `limit` runs after the n-th, as far as they are asked for, and the n to go on from.
ops['queue.find'] = function(statuses, agent, since, ended_before, after, limit)
  local keys, seen, found = {P .. 'runs'}, {}, {}
  if statuses ~= null then
    keys = {}
    for i, status in ipairs(statuses) do keys[i] = P .. 'status:' .. status end
  end
  for _, key in ipairs(keys) do
    local page = call('ZRANGEBYSCORE', key, '(' .. text(after), '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #page, 2 do seen[#seen + 1] = {page[i], tonumber(page[i + 1])} end
  end
  table.sort(seen, function(a, b) return a[2] < b[2] end)
  local more = #seen >= limit
  for i = 1, math.min(#seen, limit) do
    local row = get(seen[i][1])
    if row and (agent == null or row[AGENT] == agent) and tonumber(row[CREATED_AT]) >= since
      and (ended_before == null or row[ENDED_AT] ~= null and tonumber(row[ENDED_AT]) < ended_before) then
      found[#found + 1] = row
    end
  end
  return raw('[' .. (more and text(seen[limit][2]) or 'null') .. ',' .. all_told(found).raw .. ']')
end

ops['queue.children'] = function(run)
  local found = {}
  for _, child in ipairs(call('ZRANGE', P .. 'children:' .. run, 0, -1)) do found[#found + 1] = get(child) end
  return all_told(found)
end

ops['queue.mail'] = function(run, after)
  return raw('[' .. table.concat(call('LRANGE', P .. 'mail:' .. run, after, -1), ',') .. ']')
end

ops['queue.news'] = function(runs)
  local found = {}
  for i, run in ipairs(runs) do
    local row = get(run)
    found[i] = row and {row[STATUS], row[CLAIM_ID], row[MAIL_SEQ], row[CANCEL_AT] ~= null} or false
  end
  return found
end

ops['queue.next_due'] = function()
  local first = call('ZRANGE', P .. 'due', 0, 0, 'WITHSCORES')
  return first[2] or null
end
