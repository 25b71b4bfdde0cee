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

-- Returns an active run for which `row` must wait, after setting abandoned inline runs aside.
local function front(row, want)
  while row[LANE] ~= null do
    local active, gone = heads_of(group_of(row)), nil
    if #active < row[CONCURRENCY_LIMIT] then return nil end
    for i = 1, row[CONCURRENCY_LIMIT] do
      local each = active[i]
      if each[ORIGIN] ~= '' and each[STATUS] ~= 'waiting' and over(each, want) then
        gone = each
        break
      end
    end
    if not gone then return active[1] end
    step_aside(gone, want)
  end
end

ops['queue.take'] = function(mine, insert, reopen, asked, wait)
  local want, ended = wanted(asked), false
  local row = insert and there(mine) or get(mine[RUN_ID])
  if not row then
    if not insert then return answer('unknown') end
  elseif row[RUN_ID] ~= mine[RUN_ID] or insert and (row[DIGEST] ~= mine[DIGEST] or row[TENANT] ~= mine[TENANT]) then
    return answer('conflict', row)
  elseif row[STATUS] == 'running' and not over(row, want) then
    return answer('held', row)
  elseif not LIVE[row[STATUS]] then
    if row[STATUS] == 'succeeded' or not reopen then return answer('ended', row) end
    ended = true
  end
  local is_active = row and LIVE[row[STATUS]] and row[HELD] == 0
  local first = not is_active and front(row or mine, want) or nil
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

applied['queue.mail_count'] = ops['queue.mail_count']

applied['queue.settle'] = function(run, claim_id, status, at, due_at, _, _, _, _, _, _, _, _, _, renew)
  local row = get(run)
  if renew ~= '' then claim_id = above(renew, claim_id) end
  if not row or row[CLAIM_ID] ~= claim_id or row[STATUS] ~= status then not_applied() end
  if row[UPDATED_AT] ~= at and due_at == '0' then not_applied() end  -- a delayed run may have become due since
  return told(row)
end

ops['queue.beat'] = function(claims, lease_until)
  local answers = {}
  if by_server then present(lease_until) end
  for i, each in ipairs(claims) do
    local row = get(each[1])
    local held = row ~= nil and row[STATUS] == 'running' and row[CLAIM_ID] == each[2]
    if held then
      row[LEASE_UNTIL] = text((by_server and now() or 0) + lease_until)
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

-- Returns the open questions of a run after a message; see questions_after in records.py.
local function questions_after(questions, kind, name, id, at)
  if kind == QUESTION then return questions .. id .. ' ' .. at .. ' ' .. string.gsub(name, '\n', ' ') .. '\n' end
  if string.sub(id, 1, #ANSWER) ~= ANSWER then return questions end
  local answered = string.match(string.sub(id, #ANSWER + 1), '^[^:]*') .. ' '
  return (string.gsub(questions, '[^\n]*\n', function(line)
    if string.sub(line, 1, #answered) == answered then return '' end
  end))
end

ops['queue.post'] = function(run, kind, name, payload, id, at)
  local row = get(run)
  if not row then return {'unknown', 0} end
  local was, seq = row[STATUS], mailed(run, id)
  local due_at, was_limited = row[DUE_AT], is_limited(row, row[RATE], row[AGENT])
  if seq or not LIVE[was] then return {was, seq or 0} end
  seq = row[MAIL_SEQ] + 1
  tx.messages = tx.messages or {}
  tx.messages[run .. ' ' .. id] = seq
  write('RPUSH', P .. 'mail:' .. run, cjson.encode({kind, name, payload, id, at, seq}))
  write('HSET', P .. 'messages:' .. run, id, seq)
  row[MAIL_SEQ], row[QUESTIONS] = seq, questions_after(row[QUESTIONS], kind, name, id, at)
  if kind == 'cancel' and row[CANCEL_AT] == null then
    -- No later claim runs its code, so any worker may end it if its own process has ended or released it.
    row[CANCEL_AT], row[ORIGIN] = at, ''
    if was == 'pending' then row[DUE_AT] = '0' end  -- its next claim cancels it, so it must not be delayed
    if row[HELD] == ASIDE then enter(row) end
  end
  if was == 'waiting' then row[STATUS], row[DUE_AT] = 'pending', '0' end
  save(row)
  if was_limited and row[DUE_AT] == '0' then pass_on(row[RATE], row[AGENT], due_at) end
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
  local due_at, was_limited = row[DUE_AT], is_limited(row, row[RATE], row[AGENT])
  row[STATUS], row[HELD], row[DUE_AT], row[REASON] = status, 0, '0', reason
  row[ENDED_AT], row[UPDATED_AT] = at, at
  save(row)
  if was_limited then pass_on(row[RATE], row[AGENT], due_at) end
  return told(row)
end

ops['queue.abandoned'] = function(run, claim_id, asked, required)
  local row = get(run)
  local is_abandoned = row ~= nil and row[STATUS] == 'running' and row[CLAIM_ID] == claim_id
    and row[CANCEL_AT] ~= null and over(row, wanted(asked))
  if required and not is_abandoned then refuse('MOVED') end
  return is_abandoned
end

ops['queue.reopen'] = function(run, statuses, at)
  local row = reopened(expect(run, statuses), at)
  row[ORIGIN] = ''
  return told(save(enter(row)))
end

-- Deletes the names that are listed for a tenant, if it has no run any more.
local function forget_tenant(tenant)
  local agents = owned(P .. 'agents', tenant)
  for _, agent in ipairs(call('SMEMBERS', agents)) do
    for _, status in ipairs(STATUSES) do
      if call('EXISTS', owned(P .. 'state:' .. status .. ':' .. agent, tenant)) == 1 then return end
    end
  end
  call('DEL', agents, owned(P .. 'words', tenant))
end

ops['queue.delete'] = function(run, generation, n)
  local row = get(run)
  if row then
    if LIVE[row[STATUS]] or row[GENERATION] ~= generation or row[N] ~= n then refuse('MOVED') end
    drop(row)
    fence(run, nil)
    if row[TENANT] ~= '' then afters[#afters + 1] = function() forget_tenant(row[TENANT]) end end
  end
  return null
end

-- Replaces the contents of a row, or a part of its messages, by the same ones, encoded in another way.

ops['queue.rewrite'] = function(run, old, new, lease_now)
  local row = get(run)
  if not row then return 'gone' end
  local live_from = by_server and now() + lease_now or lease_now
  if row[STATUS] == 'running' and tonumber(row[LEASE_UNTIL]) >= live_from then return 'owned' end
  local differs = false
  for i, value in ipairs({row[INPUT], row[DIGEST], row[METADATA], row[OUTPUT], row[ERROR]}) do
    if value ~= old[i] then return 'changed' end
    differs = differs or value ~= new[i]
  end
  if not differs then return 'rewritten' end
  -- The commit adds a row of an older release to the lists, and could not read its conversation in the new input.
  if tx.rows[run].unlisted then row[CONVERSATION] = conversation_of(row[INPUT]) end
  row[INPUT], row[DIGEST], row[METADATA], row[OUTPUT], row[ERROR] = unpack(new)
  changed(row)
  return 'rewritten'
end

-- Gives a row to a tenant; see RunTransitions.assign.
ops['queue.assign'] = function(run, tenant)
  local row = get(run)
  if not row then return 'gone' end
  if row[TENANT] == tenant then return 'assigned' end
  if row[STATUS] == 'running' then return 'running' end
  if row[IDEM_KEY] ~= null and by_key(row[IDEM_KEY], tenant) then return 'taken' end
  local in_group = row[LANE] ~= null and LIVE[row[STATUS]]
  if in_group and row[STATUS] == 'waiting' and #heads_of(owned(row[LANE], tenant)) >= row[CONCURRENCY_LIMIT] then return 'taken' end
  local known, before = tx.rows[run], in_group and group_of(row)
  -- The commit stores it in all lists again, under its new keys.
  if known.unlisted and row[CONVERSATION] == null then row[CONVERSATION] = conversation_of(row[INPUT]) end
  unregister(row)
  local rate, due_at, was_limited = row[RATE], row[DUE_AT], is_limited(row, row[RATE], row[AGENT])
  if row[TURN] == row[TENANT] then row[TURN] = tenant end
  if rate ~= null then  -- in the line of the tenant, if tenants are counted apart
    local counted, mark = string.match(rate, '^(.-)(\ntenant ).*$')
    if mark then row[RATE] = counted .. mark .. tenant end
  end
  if was_limited then row[DUE_AT], row[REASON] = '0', '' end
  row[TENANT], known.was, known.unlisted = tenant, nil, true
  register(row)
  changed(row)
  if in_group then
    if row[STATUS] == 'pending' then enter(row) end
    release(before)
  end
  if was_limited then
    pass_on(rate, row[AGENT], due_at)
    ring('work')
  end
  return 'assigned'
end

ops['queue.rewrite_mail'] = function(run, changes)
  local key, done, replaced = P .. 'mail:' .. run, {}, false
  local mail = get(run) and call('LRANGE', key, 0, -1) or {}
  for i, change in ipairs(changes) do
    local message = mail[change[1]] and cjson.decode(mail[change[1]])
    done[i] = message ~= nil and message[4] == change[2] and message[3] == change[3]
    if done[i] then
      message[3], replaced = change[4], true
      mail[change[1]] = cjson.encode(message)
    end
  end
  if replaced then
    write('DEL', key)
    for _, message in ipairs(mail) do write('RPUSH', key, message) end
  end
  return done
end

-- Stores a run of another store, and messages of its mailbox; see RunTransitions.copy.
ops['queue.copy'] = function(row, messages)
  local run = row[RUN_ID]
  if not get(run) then
    if call('ZCARD', P .. 'runs') == 0 then write('SET', P .. 'lists', '1') end
    ops['queue.keep_arrival'](row[N])
    add_copied(row)
    if row[STATUS] == 'running' then fence(run, row[CLAIM_ID]) end
  end
  for _, message in ipairs(messages) do
    if not mailed(run, message[4]) then
      write('RPUSH', P .. 'mail:' .. run, cjson.encode(message))
      write('HSET', P .. 'messages:' .. run, message[4], message[6])
    end
  end
  return null
end

ops['queue.keep_arrival'] = function(last)
  tx.last = math.max(tx.last or tonumber(call('GET', P .. 'n') or 0), last)
  write('SET', P .. 'n', text(tx.last))
  return null
end

-- The processes that claim runs: a hash of [row, when it was last renewed, when it counts as ended].

ops['queue.save_process'] = function(process, cells, seen_at, alive_until, kept)
  if by_server then seen_at = text(now()) end
  local all = call('HGETALL', P .. 'processes')
  for i = 1, #all, 2 do
    if tonumber(cjson.decode(all[i + 1])[2]) < seen_at - kept then write('HDEL', P .. 'processes', all[i]) end
  end
  local until_then = text((by_server and now() or 0) + alive_until)
  write('HSET', P .. 'processes', process, cjson.encode({cells, seen_at, until_then}))
  return null
end

ops['queue.drop_process'] = function(process)
  write('HDEL', P .. 'processes', process)
  return null
end

-- States that all processes share: a hash by their names.

ops['queue.shared'] = function(prefix)
  local found, all = {}, call('HGETALL', P .. 'shared')
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, #prefix) == prefix then found[#found + 1] = {all[i], all[i + 1]} end
  end
  return found
end

ops['queue.forget_shared'] = function(states)
  for _, each in ipairs(states) do
    if call('HGET', P .. 'shared', each[1]) == each[2] then write('HDEL', P .. 'shared', each[1]) end
  end
  return null
end

-- Reads.

ops['queue.last_arrival'] = function()
  return call('GET', P .. 'n') or '0'
end

ops['queue.processes'] = function()
  local found, since = {}, by_server and now() or 0
  for i, each in ipairs(call('HVALS', P .. 'processes')) do
    local row = cjson.decode(each)
    found[i] = {row[1], text(row[2] - since), text(row[3] - since)}
  end
  return found
end

ops['queue.row'] = function(run, tenant)
  local row = get(run)
  return row and (not tenant or row[TENANT] == tenant) and told(row) or null
end

-- Returns the row as JSON, without what a filter leaves out: RunFilter.shortened in records.py.
local function shown(row, wanted)
  if not (wanted.light or wanted.without_input) then return told(row).raw end
  local short = {unpack(row)}
  short[INPUT], short[OUTPUT], short[METADATA] = '{}', null, wanted.light and '{}' or row[METADATA]
  short[CONCURRENCY_LIMIT], short[RATE], short[TURN] = 1, null, null
  return cjson.encode(short)
end

-- Returns [where to continue, [row, ...]] as JSON: of the runs {where, run} those for which will_do(row) is true.
-- Ends after `limit` runs or ENOUGH characters. `more` is where to continue after the last one.
local function listed(runs, limit, will_do, wanted, more)
  local found, size, on = {}, 0, more or 'null'
  for i, each in ipairs(runs) do
    local row = get(each[2])
    if row then
      size = size + #told(row).raw
      if will_do(row) then found[#found + 1] = shown(row, wanted) end
    end
    if i == limit or size >= ENOUGH then
      on = each[1]
      break
    end
  end
  return raw('[' .. on .. ',[' .. table.concat(found, ',') .. ']]')
end

-- Adds the `limit` members of a sorted set after the score `after` to `into`, as {n, run}.
local function look(key, after, limit, into)
  local page = call('ZRANGEBYSCORE', key, '(' .. text(after), '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #page, 2 do into[#into + 1] = {tonumber(page[i + 1]), page[i]} end
  return into
end

local function begins(text, with)
  return text ~= null and string.sub(text, 1, #with) == with
end

-- Returns a function of a row: RunFilter.admits in records.py.
local function admission(w)
  local statuses
  if w.statuses ~= null then
    statuses = {}
    for _, status in ipairs(w.statuses) do statuses[status] = true end
  end
  return function(row)
    local at = tonumber(row[CREATED_AT])
    return (not statuses or statuses[row[STATUS]]) and (w.agent == null or row[AGENT] == w.agent) and at >= w.since
      and (w['until'] == null or at < w['until'])
      and (w.ended_before == null or row[ENDED_AT] ~= null and tonumber(row[ENDED_AT]) < w.ended_before)
      and row[N] > w.after and (w.before == null or at < w.before[1] or at == w.before[1] and row[N] < w.before[2])
      and (w.prefix == null or begins(row[RUN_ID], w.prefix) or begins(row[RUN_KEY], w.prefix))
      and (w.parent == null or row[PARENT_ID] == w.parent)
      and (w.conversation == null or row[CONVERSATION] == w.conversation)
      and (w.concurrency_key == null or row[LANE] == w.concurrency_key)
      and (w.tenant == null or row[TENANT] == w.tenant) and (w.run_key == null or row[RUN_KEY] == w.run_key)
      and (w.reason == null or row[REASON] == w.reason or begins(row[REASON], w.reason .. ' '))
      and (not w.retrying or LIVE[row[STATUS]] and row[FAILURES] > 0)
      and (not w.asking or LIVE[row[STATUS]] and row[QUESTIONS] ~= '')
      and (not w.in_doubt or LIVE[row[STATUS]] and string.find(row[QUESTIONS], ' ' .. IN_DOUBT, 1, true))
  end
end

-- Returns the runs with an `n` above `after` that match the filter.
ops['queue.find'] = function(wanted, after, limit)
  local keys, runs = {P .. 'runs'}, {}
  if wanted.statuses ~= null then
    keys = {}
    for i, status in ipairs(wanted.statuses) do keys[i] = P .. 'status:' .. status end
  end
  for _, key in ipairs(keys) do look(key, after, limit, runs) end
  table.sort(runs, function(a, b) return a[1] < b[1] end)
  for _, each in ipairs(runs) do each[1] = text(each[1]) end
  return listed(runs, limit, admission(wanted), wanted)
end

-- Returns those of some runs that match the filter, in their order.
ops['queue.some'] = function(runs, wanted)
  local each = {}
  for i, run in ipairs(runs) do each[i] = {text(i), run} end
  return listed(each, #runs, admission(wanted), wanted)
end

-- Returns whether all runs are in the lists.
local function is_listed()
  return call('EXISTS', P .. 'lists') == 1 or call('ZCARD', P .. 'runs') == 0
end

-- Puts the runs after `after` into the lists, and returns `after` for the next call.
ops['queue.enlist'] = function(after, limit)
  local runs, size = look(P .. 'runs', after, limit, {}), 0
  for _, each in ipairs(runs) do
    if get(each[2]) then
      local known = tx.rows[each[2]]
      size, known.unlisted, known.dirty, known.json = size + #known.json, true, true, nil
    end
    if size >= ENOUGH then return each[1] end
  end
  if #runs == limit then return runs[limit][1] end
  write('SET', P .. 'lists', '1')
  return null
end

-- Returns the keys of the lists that have all runs of a filter.
local function keys_of(lists, wanted)
  if lists ~= null then
    local keys = {}
    for i, list in ipairs(lists) do keys[i] = P .. list end
    return keys
  end
  local tenant = wanted.tenant ~= null and wanted.tenant or ''
  local keys, agents = {}, wanted.agent ~= null and {wanted.agent} or call('SMEMBERS', owned(P .. 'agents', tenant))
  for _, status in ipairs(wanted.statuses ~= null and wanted.statuses or STATUSES) do
    for _, agent in ipairs(agents) do keys[#keys + 1] = owned(P .. 'state:' .. status .. ':' .. agent, tenant) end
  end
  return keys
end

-- Returns the members of the lists created in the range of the filter, null if they are more than `most`, false if the
-- lists have not all runs yet.
ops['queue.members'] = function(lists, wanted, most)
  if not is_listed() then return false end
  local keys, found, number = keys_of(lists, wanted), {}, 0
  local first, last = text(wanted.since), wanted['until'] == null and '+inf' or '(' .. text(wanted['until'])
  for _, key in ipairs(keys) do number = number + call('ZCOUNT', key, first, last) end
  if number > most then return null end
  for _, key in ipairs(keys) do
    for _, member in ipairs(call('ZRANGEBYSCORE', key, first, last)) do found[#found + 1] = member end
  end
  return found
end

-- Returns the members of `names` with a prefix, null if they are more than `most`, false if it has not all runs yet.
ops['queue.names'] = function(prefix, most)
  if not is_listed() then return false end
  local first, beyond = '[' .. prefix, '(' .. prefix .. '\255'
  if call('ZLEXCOUNT', P .. 'names', first, beyond) > most then return null end
  return call('ZRANGEBYLEX', P .. 'names', first, beyond)
end

-- Returns up to `count` members of a list before (at, n), newest first, as {created_at, n, member}, and whether there
-- may be more.
local function newest(key, since, at, n, count)
  local found, offset, page = {}, 0, nil
  repeat
    page = call('ZREVRANGEBYSCORE', key, text(at), text(since), 'WITHSCORES', 'LIMIT', offset, count)
    for i = 1, #page, 2 do
      local created, number = tonumber(page[i + 1]), tonumber(string.sub(page[i], 1, 16))
      if created < at or number < n then found[#found + 1] = {created, number, page[i]} end
    end
    offset = offset + count
  until #found > 0 or #page < 2 * count
  return found, #page == 2 * count
end

local function is_newer(a, b)
  if a[1] ~= b[1] then return a[1] > b[1] end
  return a[2] > b[2]
end

local function position(place)
  return string.format('[%s,%d]', text(place[1]), place[2])
end

-- Returns the newest runs of some lists before (at, n) that match the filter; false if the lists have not all runs yet.
-- It reads up to `limit` rows, and about `count` members.
ops['queue.newest'] = function(lists, wanted, at, n, limit, count)
  if not is_listed() then return false end
  local keys, all, horizon = keys_of(lists, wanted), {}, nil  -- other members may come after the horizon
  if #keys > 1 then count = math.max(10, math.ceil(3 * count / #keys)) end
  for _, key in ipairs(keys) do
    local found, more = newest(key, wanted.since, at, n, count)
    if more and (not horizon or is_newer(found[#found], horizon)) then horizon = found[#found] end
    if #keys == 1 then all = found end
    for i = 1, #keys > 1 and #found or 0 do all[#all + 1] = found[i] end
  end
  if #keys > 1 then table.sort(all, is_newer) end
  local runs = {}
  for _, each in ipairs(all) do
    if horizon and is_newer(horizon, each) or #runs == limit then break end
    local run, key = string.sub(each[3], 18, 53), string.sub(each[3], 55)
    if wanted.prefix == null or begins(run, wanted.prefix) or begins(key, wanted.prefix) then
      runs[#runs + 1] = {position(each), run}
    end
  end
  return listed(runs, limit, admission(wanted), wanted, horizon and position(horizon))
end

-- Returns the number of the runs created from `since` on, up to `count`, the time of the last of them, and the smallest
-- `n`; false if the lists have not all runs yet.
ops['queue.since'] = function(since, count)
  if not is_listed() then return false end
  local page = call('ZRANGEBYSCORE', P .. 'created', text(since), '+inf', 'LIMIT', 0, count)
  if #page == 0 then return {0, null, null} end
  local first = page[1]
  for _, member in ipairs(page) do
    if member < first then first = member end
  end
  local last = call('ZSCORE', P .. 'created', page[#page])
  return {#page, last, tonumber(string.sub(first, 1, 16))}
end

-- Returns {agent, time, index}: when the oldest run of an agent was stored that has waited for a worker since, and if
-- none is found among the next pending runs, the index of the first run that was not looked at.
local function oldest(tenant, agent, from)
  local key, ready, read = owned(P .. 'state:pending:' .. agent, tenant), P .. 'ready:' .. agent, 0
  local page = call('ZRANGE', key, from, from + MANY - 1)
  for i, member in ipairs(page) do
    if call('ZSCORE', ready, member) then
      local row = get(string.sub(member, 18))
      if row and row[UPDATED_AT] == row[CREATED_AT] then return {agent, row[CREATED_AT], null} end
      read = read + 1
      if read == 10 then return {agent, null, from + i} end  -- a row may be long
    end
  end
  return {agent, null, #page == MANY and from + MANY or null}
end

ops['queue.oldest'] = oldest

ops['queue.counts'] = function(tenant)
  if not is_listed() then return false end
  local runs, waiting, first = {}, {}, {}
  for _, agent in ipairs(call('SMEMBERS', owned(P .. 'agents', tenant))) do
    for _, status in ipairs(STATUSES) do
      local key = owned(P .. 'state:' .. status .. ':' .. agent, tenant)
      local number = call('ZCARD', key)
      if number > 0 then runs[#runs + 1] = {status, agent, number} end
      if number > 0 and status == 'pending' then first[#first + 1] = oldest(tenant, agent, 0) end
    end
  end
  for _, word in ipairs(call('SMEMBERS', owned(P .. 'words', tenant))) do
    local number = call('ZCARD', owned(P .. 'waiting:' .. word, tenant))
    if number > 0 then waiting[#waiting + 1] = {word, number} end
  end
  return {runs, first, call('ZCARD', owned(P .. 'due', tenant)), waiting}
end

ops['queue.children'] = function(run, after, limit)
  local runs = look(P .. 'children:' .. run, after, limit, {})
  for _, each in ipairs(runs) do each[1] = text(each[1]) end
  return listed(runs, limit, function() return true end, {})
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
  return first[2] and text(tonumber(first[2]) - (by_server and now() or 0)) or null
end
