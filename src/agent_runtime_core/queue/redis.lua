-- The transitions of a row that every run needs: the same rules as in transitions.py.

-- Converts a due time from the caller's clock, which shows `at` now, to the server's clock.
local function due_then(due_at, at)
  if not by_server or due_at == '0' then return due_at end
  return text(now() + math.max(due_at - at, 0))
end

-- Submitting a run.

local function there(row)
  local found = get(row[RUN_ID])
  if not found and row[IDEM_KEY] ~= null then found = by_key(row[IDEM_KEY], row[TENANT]) end
  return found
end

ops['queue.insert'] = function(row)
  local found = there(row)
  if not found then
    row[DUE_AT] = due_then(row[DUE_AT], row[UPDATED_AT])
    found = add(enter(row))
    ring('work')
  end
  return told(found)
end

-- Under a claim.

-- Returns the number of the last message in the mailbox.
ops['queue.mail_count'] = function(run)
  return call('LLEN', P .. 'mail:' .. run)
end

ops['queue.settle'] = function(run, claim_id, status, at, due_at, parked, reason, failures, crashes, stalls, mark,
  output, failure, cursor, renew, taken_back)
  local row = expect(run, {'running'})
  if row[CLAIM_ID] ~= claim_id or cursor >= 0 and cursor ~= row[MAIL_SEQ] then refuse('MOVED') end
  if row[CANCEL_AT] ~= null and (status == 'waiting' or status == 'pending') then
    -- Its next claim cancels it, so it must not be delayed. A claim that wants to park it will be notified.
    if status == 'waiting' then refuse('MOVED') end
    due_at = '0'
  end
  if (taken_back or '') ~= '' then take_back(row, taken_back) end
  row[STATUS], row[UPDATED_AT], row[DUE_AT] = status, at, due_then(due_at, at)
  row[PARKED], row[REASON] = parked, reason
  row[FAILURES], row[CRASHES], row[STALLS], row[MARK] = failures, crashes, stalls, mark
  row[OUTPUT], row[ERROR] = output, failure
  row[ENDED_AT] = LIVE[status] and null or at
  if status == 'running' then
    if renew ~= '' then
      row[CLAIM_ID] = above(renew, claim_id)
      fence(run, row[CLAIM_ID])
    end
    return told(changed(row))
  end
  fence(run, nil)
  row[LEASE_UNTIL] = '0'
  if status == 'pending' and row[ORIGIN] ~= '' then enter(row) end
  return told(save(row))
end
