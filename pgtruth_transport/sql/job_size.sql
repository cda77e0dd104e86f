-- Called by: lifecycle.size, for Channel._size: the length of a queue as AMQP means it: what could be delivered now.
-- Locks: nothing.
-- Index: jobs_claim (an index-only scan of the queue's backlog; not part of any hot path).
SELECT count(*) FROM {schema}.jobs
WHERE status = 'queued' AND queue = %(queue)s AND run_at <= (SELECT clock_timestamp())
