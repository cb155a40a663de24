-- Finds requests that nobody has kept alive for a whole lease, whoever's they are.
--
-- KEYS     (none that is a tenant's), the index of all open requests
-- ARGV     how many at most
-- returns  for each its name in the index, its note, the tokens last heard of, and when it was let in

local names = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])
local found = {}
for _, name in ipairs(names) do
  local prefix, id = string.match(name, '^(%S+) (%S+)$')
  local kept = redis.call('HMGET', prefix .. ':reserved:' .. id, 'note', 'heard', 'at')
  if kept[1] then
    found[#found + 1] = {name, kept[1], tonumber(kept[2]), tonumber(kept[3] or now)}
  else
    redis.call('ZREM', KEYS[2], name)
  end
end
return found
