-- What is asked of the state of a run, and how it goes.

local function state(run)
  return call('HMGET', P .. 'state:' .. run, 'status', 'checkpoint', 'mark', 't')
end

applied['state.checkpoint'] = function(run, checkpoint, mark, t)
  local there = state(run)
  if there[2] ~= checkpoint or (there[3] or null) ~= mark or there[4] ~= t then not_applied() end
  return null
end

applied['state.status'] = function(run, status, t)
  local there = state(run)
  if there[1] ~= status or there[4] ~= t then not_applied() end
  return null
end

ops['state.delete'] = function(run)
  write('DEL', P .. 'state:' .. run)
  delete_journal(run)
  return null
end

ops['state.row'] = function(run)
  return state(run)
end
