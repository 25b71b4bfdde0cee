-- Applies commits, each one entirely or not at all. An operation only buffers its writes in the transaction `tx`. They
-- are executed after all operations of the commit have been decided.
--
-- KEYS[1]: the prefix of all keys, "{arc}:". The braces keep all keys in one slot of a cluster. A user with access to
-- keys
--          of this prefix also has access to this key.
-- ARGV[1]: "server" if lease and wall times are on this server's clock. Times in arguments are then relative to now.
-- ARGV[2]: JSON of the commits, [[key, token, [[operation, [argument, ...]], ...]], ...]. A null key means no guard.
-- Returns a string for each commit: the JSON of its results, or "!" and the reason why nothing was written.

local P = KEYS[1]
local FENCE, MARK = P .. 'fence', 'moved'  -- a store with the fence MARK accepts only commits with this guard
local call, null = redis.call, cjson.null
local by_server = ARGV[1] == 'server'
-- `flushes` are called after all operations of a commit have been decided, `afters` after all commits were applied.
local ops, applied, flushes, afters = {}, {}, {}, {}
local rings = {}  -- number of notifications by topic
local tx, instant

-- Returns the time on this server's clock, which is the same in the whole call.
local function now()
  if not instant then
    local time = call('TIME')
    instant = time[1] + time[2] / 1000000
  end
  return instant
end

-- Encodes a number as text that is read back as the same number.
local function text(value)
  if type(value) ~= 'number' then return value end
  if value == math.floor(value) and value > -1e15 and value < 1e15 then return string.format('%d', value) end
  return string.format('%.17g', value)
end

local function refuse(why)
  error({refused = why}, 0)
end

local function lost(key, token)
  refuse('LOST ' .. key .. ' ' .. token)
end

local function not_applied()
  refuse('NOT')
end

local function write(...)
  tx.writes[#tx.writes + 1] = {...}
end

-- The type that the key of a command must have. With another type the command would fail after earlier writes of the
-- commit were executed, and the commit would be partially written.
local KIND = {
  HSET = 'hash', HDEL = 'hash', ZADD = 'zset', ZREM = 'zset', SADD = 'set', SREM = 'set', RPUSH = 'list', XADD = 'stream',
}
local fitting = {}  -- keys that have the right type: it was checked, or they were read by a command of that type

-- How to undo a command that has added one member.
local UNDO = {ZADD = 'ZREM', SADD = 'SREM'}

-- Executes all writes, or none if another program has stored a value of another type under one of the keys. To ask for
-- the type of a key is one more command. The first commands are executed without, as long as all before can be undone.
local function perform(writes)
  local added, at = {}, 1
  local function fail(said)
    for _, command in ipairs(added) do call(UNDO[command[1]], command[2], command[#command]) end
    error(said, 0)
  end
  local function check(command)
    local kind, key = KIND[command[1]], command[2]
    if not kind or fitting[key] then return end
    local there = call('TYPE', key).ok
    if there ~= kind and there ~= 'none' then
      fail('WRONGTYPE ' .. key .. ' must be a ' .. kind .. ', got a ' .. there .. ' of another program')
    end
    fitting[key] = true
  end
  local function try(command)
    local reply = redis.pcall(unpack(command))
    if type(reply) == 'table' and reply.err then
      check(command)
      fail(reply)
    end
    if KIND[command[1]] then fitting[command[2]] = true end
    return reply
  end
  while writes[at] and (writes[at][1] == 'ZADD' and #writes[at] == 4 or writes[at][1] == 'SADD' and #writes[at] == 3) do
    if try(writes[at]) == 1 then added[#added + 1] = writes[at] end
    at = at + 1
  end
  for i = at + 1, #writes do check(writes[i]) end
  if writes[at] then try(writes[at]) end
  for i = at + 1, #writes do call(unpack(writes[i])) end
end

local mark  -- the fence MARK in this call, false without one

local function ring(topic)
  tx.rings[topic] = (tx.rings[topic] or 0) + 1
end

-- Begins an empty transaction.
local function begin()
  tx = {writes = {}, rings = {}, fences = {}}
end

-- Executes the buffered writes.
local function finish()
  for _, flush in ipairs(flushes) do flush() end
  if #tx.writes > 0 and tx.guard ~= MARK then
    if mark == nil then
      mark = call('HGET', FENCE, MARK)
      fitting[FENCE] = true
    end
    if mark then refuse('MARKED ' .. mark) end
  end
  perform(tx.writes)
  if tx.fences[MARK] ~= nil then mark = tx.fences[MARK] end
  for topic, times in pairs(tx.rings) do rings[topic] = (rings[topic] or 0) + times end
end

-- Marks a result as already encoded JSON.
local function raw(json)
  return {raw = json}
end

local function fenced(key)
  local token = tx.fences[key]
  if token == nil then
    token, mark = unpack(call('HMGET', FENCE, key, MARK))  -- one command for both
    fitting[FENCE] = true
    tx.fences[key] = token
  end
  return token
end

local function fence(key, token)
  tx.fences[key] = token or false
  if token then
    write('HSET', FENCE, key, token)
  else
    write('HDEL', FENCE, key)
  end
end

ops['fence.install'] = function(key, token)
  local held = fenced(key)
  if held and held > token then lost(key, token) end
  if held ~= token then fence(key, token) end
  return true
end

applied['fence.install'] = function(key, token)
  local held = fenced(key)
  if not held or held < token then not_applied() end
  return true
end

ops['fence.forget'] = function(key)
  fence(key, nil)
  return null
end

