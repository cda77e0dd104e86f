-- Called by: chords.be_brief, in the transaction that counts a chord's members, which an application's transaction may be doing as well.
-- Locks: nothing. It holds until that transaction ends: no session state, safe behind a pooler.
-- Index: none.
SELECT set_config('lock_timeout', %(timeout)s, true)
