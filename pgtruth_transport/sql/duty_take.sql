-- Called by: reaper.sweep_if_due: whoever finds the sweep due takes it, and learns of a promotion and when it last ran.
-- Locks: the duty's row for this statement only.
-- Index: duties_pkey.
WITH last AS (SELECT ran_at FROM {schema}.duties WHERE name = %(name)s)
INSERT INTO {schema}.duties AS d (name, ran_at, ran_by, timeline, timeline_since)
VALUES (%(name)s, clock_timestamp(), %(owner)s, left(pg_walfile_name(pg_current_wal_lsn()), 8), NULL)
ON CONFLICT (name) DO UPDATE SET
    ran_at = EXCLUDED.ran_at, ran_by = EXCLUDED.ran_by, timeline = EXCLUDED.timeline,
    timeline_since = CASE WHEN d.timeline IS DISTINCT FROM EXCLUDED.timeline THEN clock_timestamp()
        ELSE d.timeline_since END
WHERE d.ran_at < clock_timestamp() - %(interval)s * interval '1 second'
RETURNING EXTRACT(EPOCH FROM clock_timestamp()
    - GREATEST(pg_postmaster_start_time(), d.timeline_since))::float8 AS settled_for,
    EXTRACT(EPOCH FROM clock_timestamp() - (SELECT ran_at FROM last))::float8 AS last_ran
