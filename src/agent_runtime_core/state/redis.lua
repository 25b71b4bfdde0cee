-- The status and checkpoint of a run are a hash. Times are strings, so that they can be compared exactly.

ops['state.checkpoint'] = function(run, checkpoint, mark, t)
  write('HSET', P .. 'state:' .. run, 'checkpoint', checkpoint, 't', t)
  if mark == null then
    write('HDEL', P .. 'state:' .. run, 'mark')
  else
    write('HSET', P .. 'state:' .. run, 'mark', mark)
  end
  return null
end

ops['state.status'] = function(run, status, t)
  write('HSET', P .. 'state:' .. run, 'status', status, 't', t)
  return null
end
