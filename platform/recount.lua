-- Forgets what all tenants' requests used of days and months, and since when they were counted, so
-- that the ledger is asked for it. A request that was let in by now is the ledger's from now on: its
-- settlement corrects its minute alone. Leases, rates and records stay.
--
-- KEYS     none: it is a Redis of our own, where keys may be looked for
-- returns  nothing

local forgotten = {':since$', ':ledger$', ':day:[%d-]+$', ':month:[%d-]+$'}

for _, key in ipairs(redis.call('KEYS', 'limits:{*')) do
  if string.find(key, ':reserved:', 1, true) then
    local minute = string.match(redis.call('HGET', key, 'windows'), '%S+')
    redis.call('HSET', key, 'windows', minute)
  else
    for _, ending in ipairs(forgotten) do
      if string.find(key, ending) then
        redis.call('DEL', key)
      end
    end
  end
end
