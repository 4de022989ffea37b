-- The web UI: who may sign in, links that let somebody, and browsers' sessions.
-- Times are Unix seconds.

CREATE TABLE grants (
    address TEXT    NOT NULL PRIMARY KEY,          -- in lower case, or *
    role    TEXT    NOT NULL,                      -- viewer, operator
    actor   TEXT    NOT NULL,
    at      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE ui_links (
    hash       TEXT    NOT NULL PRIMARY KEY,       -- sha256 of the token, hex
    role       TEXT    NOT NULL,
    actor      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE ui_sessions (
    hash       TEXT    NOT NULL PRIMARY KEY,       -- sha256 of the secret, hex
    role       TEXT    NOT NULL,
    identity   TEXT    NOT NULL,                   -- '' = opened by a link
    email      TEXT    NOT NULL,                   -- '' = none that a grant could name
    issuer     TEXT    NOT NULL,                   -- who issued the link, or the provider's host
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    fallback   INTEGER NOT NULL                    -- 1 = by no grant of its own
) STRICT, WITHOUT ROWID;
