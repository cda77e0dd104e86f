-- Called by: transport.messages.release_all, when a channel or process that may hold messages ends.
-- Locks: the messages that it holds.
-- Index: none; the table is read as a whole, once per end.
UPDATE {schema}.messages
SET owned_by = NULL, lease_expires_at = NULL, redelivered = true
WHERE owned_by = %(owner)s
RETURNING queue
