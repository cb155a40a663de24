-- The replicas whose state is to be believed now.
--
-- KEYS[1]  prefix of the replicas' keys
-- returns  {replica, life, complete, replica, …}

local time = redis.call('TIME')
local now = string.format('(%.0f', time[1] * 1000000 + time[2])
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1] .. ':leases', now, '+inf')) do
  local known = redis.call('HMGET', KEYS[1] .. ':replica:' .. name, 'life', 'complete')
  if known[1] then
    table.insert(found, name)
    table.insert(found, known[1])
    table.insert(found, known[2])
  end
end
return found
