-- Called by: signals.notify, after the commit of new jobs, as a transaction of its own; one call for all their queues.
-- Locks: the lock that the server takes for every NOTIFY at commit; held briefly, since nothing is written, or flushed.
-- Index: none.
SELECT pg_notify(c.channel, '')
FROM unnest(%(channels)s::text[]) AS c(channel)
