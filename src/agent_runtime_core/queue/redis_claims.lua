-- Claims: which runs a claim gets, in which order, and the changes to due and abandoned runs before it.


-- Returns a claim id above the last one. If the clock went back, it has the time of the last one plus 1 ms.
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

-- Returns the agents of all stored runs and of the runs of this commit, without the agent of schedules.
local function all_agents()
  local found, known = {}, {}
  local function add(agent)
    if agent ~= SCHEDULE and not known[agent] then
      known[agent] = true
      found[#found + 1] = agent
    end
  end
  for _, agent in ipairs(call('SMEMBERS', P .. 'agents')) do add(agent) end
  for agent in pairs(tx.agents or {}) do add(agent) end
  return found
end

-- Notes that a process claims or renews leases of this many seconds. Leases end on the server's clock, which continues
-- while the server is away. If nobody was here for a third of a lease, all processes renew their leases first: for a
-- while, only leases that had ended before that time are over. Returns the end of that time, or nothing.
local function present(lease)
  local known, third, instant = call('HMGET', P .. 'present', 'seen', 'before', 'until'), lease / 3, now()
  local seen, before, wait = tonumber(known[1] or instant), tonumber(known[2] or 0), tonumber(known[3] or 0)
  if instant - seen > third then
    before, wait = seen, instant + 1.25 * third
    write('HSET', P .. 'present', 'before', text(before), 'until', text(wait))
  end
  if not known[1] or instant - seen > third / 8 then write('HSET', P .. 'present', 'seen', text(instant)) end
  return instant < wait and before or nil
end

-- Decodes a ClaimRequest, with its times on the server's clock.
local function wanted(cells)
  local since = by_server and now() or 0
  local before = by_server and not cells[8] and present(cells[4]) or math.huge
  return {
    tickets = cells[1], worker = cells[2], holder = cells[3], lease_until = text(since + cells[4]),
    lease_now = math.min(since + cells[5], before), wall = by_server and text(now()) or text(cells[6]),
    agents = cells[7] ~= null and cells[7] or all_agents(), light = cells[8], after_turn = cells[11],
  }
end

local function claim(row, ticket, want, at)
  at = at or want.wall
  if row[STATUS] == 'running' then
    row[CRASHES], row[STALLS], row[PARKED] = row[CRASHES] + 1, row[STALLS] + 1, 0
  end
  row[STATUS], row[CLAIM_ID] = 'running', above(ticket, row[CLAIM_ID])
  row[WORKER], row[HOLDER], row[LEASE_UNTIL] = want.worker, want.holder, want.lease_until
  row[CLAIMED_AT], row[UPDATED_AT], row[DUE_AT], row[HELD] = at, at, '0', 0
  if row[STARTED_AT] == null then row[STARTED_AT] = at end
  if row[REASON] == RATE_LIMITED then row[REASON] = '' end
  fence(row[RUN_ID], row[CLAIM_ID])
  return changed(row)
end

-- Makes due rows ready, and returns the groups of those that are blocked. If more than MANY are due, those of
-- the greatest priorities come first.
local function promote(wall)
  local groups, left, size = {}, MANY, 0
  local function from(key)
    for _, run in ipairs(call('ZRANGEBYSCORE', key, '-inf', wall, 'LIMIT', 0, left)) do
      local row = size < MUCH and named(key, run, run)
      -- This commit may have made it ready before, or delayed it again.
      if row and row[DUE_AT] ~= '0' and tonumber(row[DUE_AT]) <= tonumber(wall) then
        row[STATUS], row[UPDATED_AT], row[DUE_AT] = 'pending', row[DUE_AT], '0'
        if row[HELD] == BEHIND then groups[#groups + 1] = group_of(row) end
        changed(row)
        left, size = left - 1, size + #row[INPUT]
      end
    end
  end
  for _, bits in ipairs(call('ZREVRANGE', P .. 'dues', 0, -1)) do from(P .. 'due:' .. bits) end
  from(P .. 'due')
  return groups
end

-- Returns the running rows of the requested agents whose leases have expired, the first that expired first.
local function expired(want, limit)
  local ends, found = {}, {}
  for _, agent in ipairs(want.agents) do
    local key, beyond = P .. 'lease:' .. agent, '(' .. text(want.lease_now)
    local page = call('ZRANGEBYSCORE', key, '-inf', beyond, 'WITHSCORES', 'LIMIT', 0, MANY)
    for i = 1, #page, 2 do ends[#ends + 1] = {key, page[i], tonumber(page[i + 1])} end
  end
  table.sort(ends, function(a, b) return a[3] < b[3] end)
  for _, each in ipairs(ends) do
    if #found == limit then break end
    local row = named(each[1], each[2], each[2])
    if row and row[STATUS] == 'running' and tonumber(row[LEASE_UNTIL]) < want.lease_now then found[#found + 1] = row end
  end
  return found
end

-- Returns the active inline runs of concurrency keys whose lease has expired, with the changes of this commit.
local function lapsed(want)
  local found = {}
  for _, run in ipairs(call('ZRANGEBYSCORE', P .. 'inline', '-inf', '(' .. text(want.lease_now), 'LIMIT', 0, MANY)) do
    named(P .. 'inline', run, run)
  end
  for _, known in pairs(tx.rows or {}) do
    local row = known and known.row
    if row and row[LANE] ~= null and row[ORIGIN] ~= '' and row[HELD] == 0
      and (row[STATUS] == 'pending' or row[STATUS] == 'running') and tonumber(row[LEASE_UNTIL]) < want.lease_now then
      found[#found + 1] = row
    end
  end
  return found
end

-- Sets an abandoned inline run aside: it blocks no other run of its concurrency key until a caller takes it again.
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

-- Returns the first ready rows of the requested agents, with the changes of this commit.
local function ready(want, limit)
  local found, wanted_agent, seen = {}, {}, {}
  local function see(row)
    if row and not seen[row] and wanted_agent[row[AGENT]] and is_ready(row) then
      seen[row] = true
      found[#found + 1] = row
      return true
    end
  end
  local changes = 0
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty and known.was and known.was[1] == 'pending' then changes = changes + 1 end
  end
  for _, agent in ipairs(want.agents) do
    local key, left, from = P .. 'ready:' .. agent, limit, 0
    wanted_agent[agent] = true
    repeat
      -- Reads more than `limit`, as some may be rows that this commit has changed and that are not ready any more.
      local page, gone = call('ZRANGE', key, from, from + limit + changes - 1), false
      for _, member in ipairs(page) do
        local row = named(key, member, string.sub(member, 18))
        gone = gone or not row
        if left > 0 and see(row) then left = left - 1 end
      end
      from = from + #page
    until left == 0 or not gone
  end
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty then see(known.row) end
  end
  table.sort(found, before)
  return found
end

-- Rate limits: the same rules as in rate_limits.py and windows.py. The state of a key has the cells of its window, and
-- the time at which the run that is delayed last is due.

local function is_limited(row, rate, agent)
  return rate ~= null and row[RATE] == rate and row[AGENT] == agent and row[REASON] == RATE_LIMITED and row[STATUS] == 'pending'
    and row[DUE_AT] ~= '0'
end

-- Returns the first run of an agent that a rate limit delays, with the changes of this commit.
local function first_limited(rate, agent)
  local key, from, size, there, first = P .. 'limited:' .. rate .. '\0' .. agent, 0, 1, false, nil
  repeat
    local page, last = call('ZRANGE', key, from, from + size - 1), size
    for _, member in ipairs(page) do
      local row = named(key, member, string.sub(member, 18))
      there = there or row and is_limited(row, rate, agent)
    end
    from, size = from + size, 8  -- the first may be rows that this commit has claimed
  until there or #page < last
  for _, known in pairs(tx.rows or {}) do
    local row = known and known.row
    if row and is_limited(row, rate, agent) and (not first or before(row, first)) then first = row end
  end
  return first
end

-- Lets the next run of a rate limit start when a delayed run, which left the line, would have started.
local function pass_on(rate, agent, due_at)
  local after = first_limited(rate, agent)
  if after and tonumber(after[DUE_AT]) > tonumber(due_at) then
    after[DUE_AT] = due_at
    changed(after)
  end
end

-- Returns by how much the clock went back since the last start of a limit, 0 if not by more than its period.
local function behind_of(line, at)
  local last = line.cells[#line.cells]
  local behind = last and last[2] - at or 0
  return behind > line.per and behind or 0
end

-- Subtracts seconds from the due times of all runs that a limit delays.
local function bring_forward(name, seconds)
  local key = P .. 'reason:' .. RATE_LIMITED
  for _, member in ipairs(call('ZRANGE', key, 0, -1)) do named(key, member, string.sub(member, 18)) end
  for _, known in pairs(tx.rows or {}) do
    local row = known and known.row
    if row and is_limited(row, row[RATE], row[AGENT]) and 'rate:' .. string.match(row[RATE], '^%S+ (.*)$') == name then
      row[DUE_AT] = text(tonumber(row[DUE_AT]) - seconds)
      changed(row)
    end
  end
end

local function line_in(name, stored)
  local state = stored and cjson.decode(stored) or {0, {}, {}}
  return {tail = state[1], left = state[2], cells = state[3], per = tonumber(string.match(name, '^rate:(%S+)'))}
end

-- Returns the state of a rate limit, with the changes of this commit.
local function line_named(name)
  tx.lines = tx.lines or {}
  if not tx.lines[name] then tx.lines[name] = line_in(name, call('HGET', P .. 'shared', name)) end
  return tx.lines[name]
end

-- Returns the state of a rate limit for a claim, which stores it.
local function line_of(name, want)
  local line, at = line_named(name), tonumber(want.wall)
  want.lines = want.lines or {}
  if want.lines[name] then return line end
  want.lines[name] = line
  local behind = behind_of(line, at)
  if behind > 0 then
    for _, cell in ipairs(line.cells) do cell[1], cell[2] = cell[1] - behind, cell[2] - behind end
    line.tail = line.tail - behind
    for i, each in ipairs(line.left) do line.left[i] = each - behind end
    bring_forward(name, behind)
  end
  return line
end

-- Brings delayed runs forward if the clock went back since the last claim.
local function follow_clock(want)
  local at, before, found = tonumber(want.wall), tonumber(call('HGET', P .. 'present', 'claimed') or nil), false
  if before and at >= before - CLOCK_STEP and at <= before + CLOCK_STEP then return end
  if not before or at < before then
    local all = call('HGETALL', P .. 'shared')
    for i = 1, #all, 2 do
      if string.sub(all[i], 1, 5) == 'rate:' and behind_of(line_in(all[i], all[i + 1]), at) > 0 then
        line_of(all[i], want)
      end
    end
  end
  write('HSET', P .. 'present', 'claimed', want.wall)
end

local function line_text(line)
  local cells = {}
  for i, cell in ipairs(line.cells) do
    cells[i] = '[' .. text(cell[1]) .. ',' .. text(cell[2]) .. ',' .. text(cell[3]) .. ']'
  end
  local left = {}
  for i, at in ipairs(line.left) do left[i] = text(at) end
  return '[' .. text(line.tail) .. ',[' .. table.concat(left, ',') .. '],[' .. table.concat(cells, ',') .. ']]'
end

-- Takes back the start that a limit counts for the claim of a row, and lets the next delayed run start instead.
local function take_back(row, rate)
  local name, at = 'rate:' .. string.match(rate, '^%S+ (.*)$'), tonumber(row[CLAIMED_AT])
  local line = line_named(name)
  for _, cell in ipairs(line.cells) do
    if cell[1] <= at and at <= cell[2] and cell[3] >= 1 then
      cell[3] = cell[3] - 1
      write('HSET', P .. 'shared', name, line_text(line))
      return pass_on(row[RATE], row[AGENT], row[CLAIMED_AT])
    end
  end
end

-- Drops the cells that have ended, and returns the time at which a start counts now.
local function move_to(line, at)
  local last, cells = line.cells[#line.cells], {}
  if last then at = math.max(at, last[2]) end
  for _, cell in ipairs(line.cells) do
    if at - cell[2] < line.per then cells[#cells + 1] = cell end
  end
  line.cells = cells
  return at
end

local function free_at(line, starts, at)
  move_to(line, at)
  local left, free = 0, at
  for _, cell in ipairs(line.cells) do left = left + cell[3] end
  for _, cell in ipairs(line.cells) do
    if left + 1 <= starts then break end
    left, free = left - cell[3], cell[2] + line.per
    while free - cell[2] < line.per do free = free + math.abs(free) * 2 ^ -52 end  -- the sum was rounded down
  end
  return math.max(free, at)
end

local function count_start(line, at)
  at = move_to(line, at)
  local last = line.cells[#line.cells]
  if last and at - last[1] < line.per / CELLS then
    last[2], last[3] = at, last[3] + 1
  else
    line.cells[#line.cells + 1] = {at, at, 1}
  end
  return at
end

-- Returns when a run is due that cannot start before `free`. Each delayed run has another time, so that some run is due
-- whenever there is room. The time of a run that has started before it was due is left over for the next one.
local function due_of(line, row, starts, free, want)
  local at, step = nil, math.min(STEP, line.per / CELLS)
  if row[REASON] == RATE_LIMITED and not want.next_known[line] then
    -- It was due too early, because runs before it started late. It starts the others of that time with it.
    want.next_known[line] = true
    at = free
  end
  for i, each in ipairs(line.left) do
    if not at and each >= free then at = table.remove(line.left, i) end
  end
  if not at then
    at = math.max(free, line.tail)
    line.tail = at + line.per / starts
  end
  return math.max(math.ceil(at / step) * step, at)
end

local function started_before_due(line, row, at)
  local left = {}
  line.left[#line.left + 1] = tonumber(row[DUE_AT])
  table.sort(line.left)
  for _, each in ipairs(line.left) do
    if each > at and #left < MOST_LEFT then left[#left + 1] = each end
  end
  line.left = left
end

local function delay(row, due_at)
  if row[STATUS] == 'running' then
    fence(row[RUN_ID], nil)
    row[CRASHES], row[STALLS] = row[CRASHES] + 1, row[STALLS] + 1
  end
  row[STATUS], row[DUE_AT], row[REASON], row[PARKED], row[LEASE_UNTIL] = 'pending', text(due_at), RATE_LIMITED, 0, '0'
  changed(row)
end

-- Returns whether a worker ends a run that it claims now, because it is too late to start.
local function is_over(row, at)
  if row[DEADLINE] ~= null and at >= tonumber(row[DEADLINE]) then return true end
  return row[STARTED_AT] == null and row[MARK] < 0
    and row[EXPIRES_AT] ~= null and at > tonumber(row[EXPIRES_AT])
end

-- Returns the run that may start because `row` may be claimed, and when it starts. It is `row`, or a delayed run of the
-- same agent and limit that comes before. Returns nothing if `row` was delayed.
local function startable(row, want)
  if row[RATE] == null or row[PARKED] ~= 0 and row[STATUS] ~= 'running' or row[CANCEL_AT] ~= null then return row end
  local starts, name = string.match(row[RATE], '^(%S+) (.*)$')
  local at, line = tonumber(want.wall), line_of('rate:' .. name, want)
  starts = tonumber(starts)
  local free, ends = free_at(line, starts, at), is_over(row, at)
  if free > at then
    if ends then return row end
    if line.tail > free and not want.checked[line] then
      if not first_limited(row[RATE], row[AGENT]) then line.tail, line.left = 0, {} end
      want.checked[line] = true
    end
    delay(row, due_of(line, row, starts, free, want))
    want.delayed = want.delayed + 1
    return nil
  end
  local first = first_limited(row[RATE], row[AGENT])
  if not first then
    line.tail, line.left = 0, {}  -- all delayed runs have started or ended
  elseif ends or before(first, row) then
    started_before_due(line, first, at)
    row, ends = first, is_over(first, at)
  end
  if ends then return row end
  return row, text(count_start(line, at))
end

-- Returns the first ready row with that priority and a turn above `after` (of all turns if it is nil), with the changes
-- of this commit.
local function next_turn(want, priority, after)
  local best, wanted_agent = nil, {}
  local function see(row)
    if not row or not wanted_agent[row[AGENT]] or row[TURN] == null or row[PRIORITY] ~= priority or not is_ready(row)
      or after and row[TURN] <= after then
      return false
    end
    if not best or row[TURN] < best[TURN] or row[TURN] == best[TURN] and row[N] < best[N] then best = row end
    return true
  end
  for _, agent in ipairs(want.agents) do
    wanted_agent[agent] = true
    local key, size, seen = P .. 'turns:' .. agent .. '\0' .. priority, 1, false
    local from, page, last = after and '(' .. after .. '\0\255' or '-', nil, nil
    repeat
      page, last, size = call('ZRANGEBYLEX', key, from, '+', 'LIMIT', 0, size), size, 8
      for _, member in ipairs(page) do
        seen = see(named(key, member, string.match(member, '%z%d+:(.*)$'))) or seen
        from = '(' .. member
      end
    until seen or #page < last
  end
  for _, known in pairs(tx.rows or {}) do
    if known and known.dirty then see(known.row) end
  end
  return best
end

-- Claims ready rows with take(), each time of the next turn.
local function take_turns(want, got, free, take)
  local head, after = ready(want, 1)[1], want.after_turn
  while head and #got < free and want.delayed < MOST_DELAYED do
    local row = next_turn(want, head[PRIORITY], after)
    if not row then  -- the circle begins again, unless all rows of that priority were claimed
      local priority = head[PRIORITY]
      head = ready(want, 1)[1]
      if head and head[PRIORITY] == priority then
        row = next_turn(want, priority, nil)
        if not row or head[TURN] == null and (row[TURN] > '' or row[N] > head[N]) then row = head end
      end
    end
    if row then
      after = row[TURN] ~= null and row[TURN] or ''
      take({row}, 1)
    end
  end
end

-- Claims runs for a request, and returns them.
local function claims(want)
  local got, free = {}, #want.tickets
  want.delayed, want.next_known, want.checked = 0, {}, {}
  local function take(rows, most)
    for i = 1, math.min(#rows, most) do
      local row = rows[i]
      while #got < free and want.delayed < MOST_DELAYED do
        local chosen, at = startable(row, want)
        if chosen then got[#got + 1] = claim(chosen, want.tickets[#got + 1], want, at) end
        if not chosen or chosen == row then break end
      end
    end
  end
  if not want.light then
    for _, group in ipairs(promote(want.wall)) do release(group) end
    local fallen = expired(want, free)
    for _, row in ipairs(lapsed(want)) do step_aside(row, want) end
    follow_clock(want)
    take(fallen, free)
  end
  if want.after_turn and want.after_turn ~= null then take_turns(want, got, free, take) end
  local limit = free - #got
  while #got < free and want.delayed < MOST_DELAYED do
    local delayed = want.delayed
    take(ready(want, limit), limit)
    if want.delayed == delayed then break end
    limit = MOST_DELAYED
  end
  if want.delayed >= MOST_DELAYED and #got < free then ring('work') end  -- others may follow them
  for name, line in pairs(want.lines or {}) do write('HSET', P .. 'shared', name, line_text(line)) end
  return got
end

-- Blocking claims: a request that found no run waits here, and claims the next run while its worker subscribes to the
-- channel of its name. `stands` is a sorted set of the names by the time until which they wait. `standing` is a hash of
-- the requests by name.

local function sit(name)
  write('ZREM', P .. 'stands', name)
  write('HDEL', P .. 'standing', name)
end

ops['queue.sit'] = function(name)
  local stood = call('HEXISTS', P .. 'standing', name) == 1
  if stood then sit(name) end
  return stood
end

ops['queue.claim'] = function(cells)
  local got, name = claims(wanted(cells)), cells[9]
  if #got == 0 and name and name ~= null then
    for _, over in ipairs(call('ZRANGEBYSCORE', P .. 'stands', '-inf', text(now()), 'LIMIT', 0, STANDING)) do sit(over) end
    cells[8] = true
    write('ZADD', P .. 'stands', text(now() + cells[10]), name)
    write('HSET', P .. 'standing', name, cjson.encode(cells))
  end
  return all_told(got)
end

-- Lets blocking claims claim the runs that have become ready. A blocking claim is removed once it has claimed a run, or
-- if no process subscribes to its channel.
local function hand_over()
  local made_ready, taken = rings.work or 0, 0
  if made_ready == 0 or not by_server then return end  -- without the server's clock, the lease would have no start
  local names = call('ZREVRANGE', P .. 'stands', 0, STANDING - 1, 'WITHSCORES')
  for i = 1, #names, 2 do
    local name, cells = names[i], call('HGET', P .. 'standing', names[i])
    begin()
    local got = cells and tonumber(names[i + 1]) > now() and claims(wanted(cjson.decode(cells)))
    local told = got and #got > 0 and all_told(got).raw
    local heard = told and #told <= LETTER and call('PUBLISH', P .. 'bell:stand:' .. name, told) > 0
    if not heard then begin() end
    if heard or not got or told and #told <= LETTER then sit(name) end
    finish()
    if heard then taken = taken + #got end
    if taken >= made_ready then
      rings.work = nil
      return
    end
  end
end
afters[#afters + 1] = hand_over
