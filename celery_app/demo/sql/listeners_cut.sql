-- The demo's fault in notify mode: cut every connection that listens for wake-ups.
-- Locks nothing.
-- Reads pg_stat_activity.
SELECT pg_terminate_backend(pid)
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE '%%:listen';
