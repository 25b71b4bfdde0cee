-- Pools: what runs have spent and reserved in a period. The rules are those of pools.py and windows.py. A state is
-- {per, tenant, ends, limits, cells, open}: cells of [first, last, usd, tokens, requests], and reservations of [id, at,
-- usd, tokens, requests]. This file takes the places of both modules, because the amounts of a cell change together.

local FIRST, LAST, LENGTHS = 1, 2, {hour = 3600, day = 86400}

-- Returns the days since 1970 of the first day of the next month, after those `days`. The year begins in March:
-- http://howardhinnant.github.io/date_algorithms.html
local function next_month(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local month, year = math.floor((5 * doy + 2) / 153) + 1, yoe + era * 400
  if month == 12 then month, year = 0, year + 1 end
  era = math.floor(year / 400)
  yoe = year - era * 400
  doe = yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + math.floor((153 * month + 2) / 5)
  return era * 146097 + doe - 719468
end

local function end_of(per, at)
  local length = LENGTHS[per]
  if length then return (math.floor(at / length) + 1) * length end
  return next_month(math.floor(at / 86400)) * 86400
end

local function cell_of(pool, at)
  for _, cell in ipairs(pool.cells) do
    if cell[FIRST] <= at and at <= cell[LAST] then return cell end
  end
end

-- Closes the reservation at this index: the call has used `amounts`.
local function close(pool, index, amounts)
  local held = table.remove(pool.open, index)
  local cell = cell_of(pool, held[2])
  for unit = 3, 5 do cell[unit] = cell[unit] + amounts[unit - 2] - held[unit] end
end

local NOTHING = {0, 0, 0}

-- Drops the cells that have ended, and returns the time at which an amount added now counts.
local function moved(pool, at)
  local cells, last = pool.cells, pool.cells[#pool.cells]
  local behind = last and last[LAST] - at or 0
  if behind > pool.length then  -- the clock went back
    for _, cell in ipairs(cells) do cell[FIRST], cell[LAST] = cell[FIRST] - behind, cell[LAST] - behind end
    for _, held in ipairs(pool.open) do held[2] = held[2] - behind end
  end
  if last then at = math.max(at, last[LAST]) end
  pool.cells = {}
  for _, cell in ipairs(cells) do
    if at - cell[LAST] < pool.length then table.insert(pool.cells, cell) end
  end
  return at
end

-- Returns a pool as it is now. With `per` nil, the period is the stored one, and nil is returned if none is stored.
local function pool_of(name, per, at)
  tx.pools = tx.pools or {}
  local stored = tx.pools[name]
  if stored == nil then stored = call('HGET', P .. 'shared', 'pool:' .. name) end
  local pool = stored and cjson.decode(stored) or {}
  per = per or pool.per
  if not per then return nil end
  if pool.per ~= per then pool = {per = per} end
  pool.name, pool.tenant, pool.limits = name, pool.tenant or '', pool.limits or {-1, -1, -1}
  pool.cells, pool.open, pool.length = pool.cells or {}, pool.open or {}, per
  local ends = pool.ends or 0
  pool.ends = 0
  if type(per) == 'string' then
    pool.length, pool.ends = math.huge, end_of(per, at)
    if ends > pool.ends and ends <= end_of(per, pool.ends) then pool.ends = ends end
    if ends < pool.ends then pool.cells = {} end
  end
  moved(pool, at)
  for i = #pool.open, 1, -1 do
    if not cell_of(pool, pool.open[i][2]) then
      table.remove(pool.open, i)
    elseif pool.open[i][2] < at - HELD then
      close(pool, i, NOTHING)
    end
  end
  return pool
end

local function list(rows)
  for i, row in ipairs(rows) do
    for each, value in ipairs(row) do
      row[each] = type(value) == 'string' and cjson.encode(value) or text(value)
    end
    rows[i] = '[' .. table.concat(row, ',') .. ']'
  end
  return '[' .. table.concat(rows, ',') .. ']'
end

local function save_pool(pool)
  local counts = #pool.open > 0
  for _, cell in ipairs(pool.cells) do counts = counts or cell[3] ~= 0 or cell[4] ~= 0 or cell[5] ~= 0 end
  if not counts then
    tx.pools[pool.name] = false
    write('HDEL', P .. 'shared', 'pool:' .. pool.name)
    return
  end
  table.sort(pool.open, function(a, b) return a[1] < b[1] end)
  local per = type(pool.per) == 'string' and cjson.encode(pool.per) or text(pool.per)
  local stored = '{"per":' .. per .. ',"tenant":' .. cjson.encode(pool.tenant) .. ',"ends":' .. text(pool.ends)
    .. ',"limits":' .. list({pool.limits}):sub(2, -2) .. ',"cells":' .. list(pool.cells) .. ',"open":'
    .. list(pool.open) .. '}'
  tx.pools[pool.name] = stored
  write('HSET', P .. 'shared', 'pool:' .. pool.name, stored)
end

-- Returns when an amount can be added; nil for not in this period.
local function free_at(pool, unit, amount, limit, at)
  if amount > limit then return nil end
  local free, sum = at, 0
  for _, cell in ipairs(pool.cells) do sum = sum + cell[unit] end
  for _, cell in ipairs(pool.cells) do
    if sum + amount <= limit then break end
    if pool.length == math.huge then return nil end
    sum, free = sum - cell[unit], cell[LAST] + pool.length
    while free - cell[LAST] < pool.length do free = free + math.abs(free) * 2 ^ -52 end  -- the sum was rounded down
  end
  return math.max(free, at)
end

-- Returns why the amounts cannot be reserved: {name, unit, used, seconds, is_reserved}; nil if there is room.
local function refusal(pool, limits, amounts, at)
  local found
  for i = 1, 3 do
    if limits[i] >= 0 then
      local free = free_at(pool, i + 2, amounts[i], limits[i], at)
      if not free then free = pool.ends ~= 0 and pool.ends or at + pool.length end
      if free > at and (not found or free - at > found[4]) then
        local used, held = 0, 0
        for _, cell in ipairs(pool.cells) do used = used + cell[i + 2] end
        for _, each in ipairs(pool.open) do held = held + each[i + 2] end
        found = {pool.name, i - 1, used, free - at, used - held + amounts[i] <= limits[i]}
      end
    end
  end
  return found
end

ops['queue.reserve'] = function(id, wanted_pools, at, forced)
  if by_server then at = now() end
  local found, refused = {}, {}
  for i, want in ipairs(wanted_pools) do
    local pool = pool_of(want[1], want[3], at)
    for j = #pool.open, 1, -1 do
      if pool.open[j][1] == id then close(pool, j, NOTHING) end
    end
    found[i] = pool
    local why = not forced and refusal(pool, want[4], want[5], at)
    if why then table.insert(refused, why) end
  end
  for i, want in ipairs(wanted_pools) do
    local pool, amounts = found[i], want[5]
    pool.tenant, pool.limits = want[2], want[4]
    if #refused == 0 then
      local time, last = moved(pool, at), pool.cells[#pool.cells]
      if last and time - last[FIRST] < pool.length / CELLS then
        last[LAST] = time
        for unit = 3, 5 do last[unit] = last[unit] + amounts[unit - 2] end
      else
        table.insert(pool.cells, {time, time, unpack(amounts)})
      end
      table.insert(pool.open, {id, time, unpack(amounts)})
    end
    save_pool(pool)
  end
  for _, why in ipairs(refused) do why[3], why[4] = text(why[3]), text(why[4]) end
  return refused
end

local function close_all(names, at, is_wanted, amounts)
  if by_server then at = now() end
  for _, name in ipairs(names) do
    local pool = pool_of(name, nil, at)
    if pool then
      for i = #pool.open, 1, -1 do
        if is_wanted(pool.open[i][1]) then close(pool, i, amounts) end
      end
      save_pool(pool)
    end
  end
  return null
end

ops['queue.spend'] = function(names, id, amounts, at)
  return close_all(names, at, function(each) return each == id end, amounts)
end

ops['queue.give_back'] = function(names, prefix, at)
  return close_all(names, at, function(each) return string.sub(each, 1, #prefix) == prefix end, NOTHING)
end
