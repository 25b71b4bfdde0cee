-- Rare operations on rows, and reads.

-- Submitting a run.

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

-- Returns the active run with the concurrency key of `row`, after setting abandoned inline runs aside.
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

-- Under a claim.

applied['queue.settle'] = function(run, claim_id, status, at, _, _, _, _, _, _, _, _, _, _, renew)
  local row = get(run)
  if renew ~= '' then claim_id = above(renew, claim_id) end
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
    answers[i] = {held, held and row[CANCEL_AT] ~= null}
  end
  return answers
end

applied['queue.claim'] = function()
  return {}
end

-- Without a claim.

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
    -- No later claim runs its code, so any worker may end it if its own process has ended or released it.
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

ops['queue.delete'] = function(run, generation, n)
  local row = get(run)
  if row then
    if LIVE[row[STATUS]] or row[GENERATION] ~= generation or row[N] ~= n then refuse('MOVED') end
    drop(row)
    fence(run, nil)
  end
  return null
end

-- Reads.

ops['queue.row'] = function(run)
  local row = get(run)
  return row and told(row) or null
end

-- Returns [`after` for the next call, [row, ...]] as JSON: of the runs {n, run} those for which will_do(row) is true.
-- Ends after `limit` runs or ENOUGH characters.
local function listed(runs, limit, will_do)
  local found, size = {}, 0
  local on = 'null'
  for i, each in ipairs(runs) do
    local row = get(each[2])
    if row then
      size = size + #told(row).raw
      if will_do(row) then found[#found + 1] = row end
    end
    if i == limit or size >= ENOUGH then
      on = text(each[1])
      break
    end
  end
  return raw('[' .. on .. ',' .. all_told(found).raw .. ']')
end

-- Adds the `limit` members of a sorted set after the score `after` to `into`, as {n, run}.
local function look(key, after, limit, into)
  local page = call('ZRANGEBYSCORE', key, '(' .. text(after), '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #page, 2 do into[#into + 1] = {tonumber(page[i + 1]), page[i]} end
  return into
end

-- Returns the runs with an `n` above `after` that match the filter.
ops['queue.find'] = function(statuses, agent, since, ended_before, after, limit)
  local keys, runs = {P .. 'runs'}, {}
  if statuses ~= null then
    keys = {}
    for i, status in ipairs(statuses) do keys[i] = P .. 'status:' .. status end
  end
  for _, key in ipairs(keys) do look(key, after, limit, runs) end
  table.sort(runs, function(a, b) return a[1] < b[1] end)
  return listed(runs, limit, function(row)
    return (agent == null or row[AGENT] == agent) and tonumber(row[CREATED_AT]) >= since
      and (ended_before == null or row[ENDED_AT] ~= null and tonumber(row[ENDED_AT]) < ended_before)
  end)
end

ops['queue.children'] = function(run, after, limit)
  return listed(look(P .. 'children:' .. run, after, limit, {}), limit, function() return true end)
end

-- Returns [`after` for the next call, [message, ...]] as JSON.
ops['queue.mail'] = function(run, after, limit)
  local found = {}
  local last = through(limit, function(_, count)
    local from = after + #found
    return call('LRANGE', P .. 'mail:' .. run, from, from + count - 1)
  end, function(message)
    found[#found + 1] = message
    return #message
  end)
  return raw('[' .. (last and text(after + #found) or 'null') .. ',[' .. table.concat(found, ',') .. ']]')
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
  return first[2] and text(tonumber(first[2]) - (by_server and now or 0)) or null
end
