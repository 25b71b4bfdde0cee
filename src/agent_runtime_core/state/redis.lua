-- The status of a run and its checkpoint are a hash. Times come as text, to be compared.

local function state(run)
  return call('HMGET', P .. 'state:' .. run, 'status', 'checkpoint', 'mark', 't')
end

ops['state.checkpoint'] = function(run, checkpoint, mark, t)
  write('HSET', P .. 'state:' .. run, 'checkpoint', checkpoint, 't', t)
  if mark == null then
    write('HDEL', P .. 'state:' .. run, 'mark')
  else
    write('HSET', P .. 'state:' .. run, 'mark', mark)
  end
  return null
end

applied['state.checkpoint'] = function(run, checkpoint, mark, t)
  local there = state(run)
  if there[2] ~= checkpoint or (there[3] or null) ~= mark or there[4] ~= t then not_applied() end
  return null
end

ops['state.status'] = function(run, status, t)
  write('HSET', P .. 'state:' .. run, 'status', status, 't', t)
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
