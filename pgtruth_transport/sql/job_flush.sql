-- Called by: lifecycle.enqueue_now, after job_enqueue_one: returns, with a row, when this server has flushed what it committed before, the job included.
-- Locks: none. The message is a few bytes in the log, since a commit flushes only where something was written; nobody reads it.
-- Index: jobs_pkey.
SELECT pg_logical_emit_message(true, 'pgtruth', '') IS NOT NULL
FROM {schema}.jobs
WHERE id = %(id)s
