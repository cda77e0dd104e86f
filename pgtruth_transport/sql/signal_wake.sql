-- Called by: signals.notify, after the commit of new jobs, on a connection of its own; one call for all their queues.
-- Locks: the lock that the server takes for every NOTIFY at commit; held for microseconds, since no flush is waited for.
-- Index: none.
SELECT set_config('synchronous_commit', 'off', true), pg_notify(c.channel, '')
FROM unnest(%(channels)s::text[]) AS c(channel)
