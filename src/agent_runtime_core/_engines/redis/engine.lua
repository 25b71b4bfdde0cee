-- Carries out commits, each of them whole or not at all: what an operation writes is only noted down, in the
-- transaction `tx`, and done once all operations of the commit have been decided.
--
-- KEYS[1]: what all keys begin with, "{arc}:": the braces keep them in one slot of a cluster, and a user who may use
-- keys that begin so may use this one.
-- ARGV[1]: "server" where lease and wall times are this server's: those given then count from now.
-- ARGV[2]: JSON of the commits, [[key, token, [[operation, [argument, ...]], ...]], ...]; a null key is no guard.
-- Returns a text for each: the JSON of its results, or "!" and why nothing was done.

local P = KEYS[1]
local FENCE = P .. 'fence'
local call, null = redis.call, cjson.null
local instant = call('TIME')
local now = instant[1] + instant[2] / 1000000
local by_server = ARGV[1] == 'server'
-- `flushes` are called when all operations of a commit have been decided, `afters` when all commits were carried out.
local ops, applied, flushes, afters = {}, {}, {}, {}
local rings = {}  -- how often each topic was rung
local tx

-- What a number is stored as: read back, it is the same number.
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

-- What a command needs its key to be, where it would fail after others have written.
local KIND = {
  HSET = 'hash', HDEL = 'hash', ZADD = 'zset', ZREM = 'zset', SADD = 'set', SREM = 'set', RPUSH = 'list', XADD = 'stream',
}
local fitting = {}  -- keys that were found to be that: by a look, or because they were read as that

-- Writes all of it or, where somebody else has put another kind of thing under one of our keys, none.
local function perform(writes)
  for _, command in ipairs(writes) do
    local kind, key = KIND[command[1]], command[2]
    if kind and not fitting[key] then
      local there = call('TYPE', key).ok
      if there ~= kind and there ~= 'none' then
        error('WRONGTYPE ' .. key .. ' is a ' .. there .. ' of somebody else, and no ' .. kind, 0)
      end
      fitting[key] = true
    end
  end
  for _, command in ipairs(writes) do call(unpack(command)) end
end

local function ring(topic)
  tx.rings[topic] = (tx.rings[topic] or 0) + 1
end

-- A transaction, of which nothing is noted down yet.
local function begin()
  tx = {writes = {}, rings = {}, fences = {}}
end

-- What was noted down is done.
local function finish()
  for _, flush in ipairs(flushes) do flush() end
  perform(tx.writes)
  for topic, times in pairs(tx.rings) do rings[topic] = (rings[topic] or 0) + times end
end

-- A result that is JSON already.
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

