-- Called by: lifecycle.enqueue_now, as a transaction of its own that returns before its flush, for which job_flush waits: workers look meanwhile.
-- Locks: the row it inserts; the lock that the server takes for every NOTIFY at commit, held briefly, since no flush comes before its end. An id that exists is left alone (first write wins), unless the job is open: then this is its message.
-- Index: jobs_pkey for the conflict.
INSERT INTO {schema}.jobs AS j (
    id, status, task, queue, priority, run_at, expires_at, retry_count, headers, properties, body,
    root_id, parent_id, group_id)
VALUES (
    %(id)s, 'queued', %(task)s, %(queue)s, %(priority)s,
    COALESCE(%(eta)s::timestamptz, clock_timestamp() + COALESCE(%(delay)s::float8, 0) * interval '1 second'),
    COALESCE(%(expires)s::timestamptz, clock_timestamp() + %(expires_in)s::float8 * interval '1 second'),
    %(retries)s, %(headers)s, %(properties)s, %(body)s, %(root_id)s, %(parent_id)s, %(group_id)s)
ON CONFLICT (id) DO UPDATE SET
    task = EXCLUDED.task, queue = EXCLUDED.queue, priority = EXCLUDED.priority, run_at = EXCLUDED.run_at,
    expires_at = EXCLUDED.expires_at, headers = EXCLUDED.headers, properties = EXCLUDED.properties,
    body = EXCLUDED.body, root_id = EXCLUDED.root_id, parent_id = EXCLUDED.parent_id, group_id = EXCLUDED.group_id,
    updated_at = clock_timestamp()
WHERE j.status = 'queued' AND j.run_at = 'infinity'
RETURNING j.id, set_config('synchronous_commit', 'off', true),
    CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, '')::text END
