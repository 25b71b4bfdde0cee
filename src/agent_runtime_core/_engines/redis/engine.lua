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
local FENCE = P .. 'fence'
local call, null = redis.call, cjson.null
local instant = call('TIME')
local now = instant[1] + instant[2] / 1000000
local by_server = ARGV[1] == 'server'
-- `flushes` are called after all operations of a commit have been decided, `afters` after all commits were applied.
local ops, applied, flushes, afters = {}, {}, {}, {}
local rings = {}  -- number of notifications by topic
local tx

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

-- Executes all writes, or none if another program has stored a value of another type under one of the keys.
local function perform(writes)
  for _, command in ipairs(writes) do
    local kind, key = KIND[command[1]], command[2]
    if kind and not fitting[key] then
      local there = call('TYPE', key).ok
      if there ~= kind and there ~= 'none' then
        error('WRONGTYPE ' .. key .. ' must be a ' .. kind .. ', got a ' .. there .. ' of another program', 0)
      end
      fitting[key] = true
    end
  end
  for _, command in ipairs(writes) do call(unpack(command)) end
end

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
  perform(tx.writes)
  for topic, times in pairs(tx.rings) do rings[topic] = (rings[topic] or 0) + times end
end

-- Marks a result as already encoded JSON.
local function raw(json)
  return {raw = json}
end

local function fenced(key)
  local token = tx.fences[key]
  if token == nil then
    token = call('HGET', FENCE, key)
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

