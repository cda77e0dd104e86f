-- Called by: effects.book.listed, for the command line: the newest first, unknown ones the oldest first.
-- Locks: nothing.
-- Index: effects_unknown and effects_started where those states are asked for; otherwise the table.
SELECT key, kind, state, calls, job_id, resource, fence, error, checks, started_at, updated_at, unknown_since,
    extract(epoch FROM clock_timestamp() - COALESCE(unknown_since, updated_at))::float8 AS age
FROM {schema}.effects
WHERE state = ANY (%(states)s) AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
ORDER BY unknown_since NULLS LAST, updated_at DESC, key
LIMIT %(limit)s
