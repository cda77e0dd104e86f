-- Called by: doctor, once, by hand.
-- Locks: nothing; reads the server's settings and its activity view.
-- Index: none; no table is read.
SELECT current_setting('server_version')                AS version,
       current_setting('server_version_num')::int       AS version_number,
       current_setting('server_encoding')               AS encoding,
       pg_is_in_recovery()                              AS standby,
       current_setting('default_transaction_read_only') AS read_only,
       current_setting('fsync')                         AS fsync,
       current_setting('synchronous_commit')            AS synchronous_commit,
       current_setting('max_connections')::int          AS max_connections,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       pg_backend_pid()                                 AS backend_pid,
       extract(epoch FROM clock_timestamp())::float8    AS clock
