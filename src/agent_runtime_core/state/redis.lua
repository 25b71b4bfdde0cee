-- The status of a run and its checkpoint are a hash. Times come as text, to be compared.

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
