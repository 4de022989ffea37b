// An OpenID provider with one client and accounts for anybody: the login is the
// name, and NAME@example.com the address. Prints "ready", then each request on
// a line, METHOD and path.
import { readFileSync } from 'node:fs';
import { createServer } from 'node:https';
import Provider from 'oidc-provider';

const o = JSON.parse(process.argv[2]); // port, issuer, cert, key, clientID, secret, redirects

const provider = new Provider(o.issuer, {
  clients: [{
    client_id: o.clientID,
    client_secret: o.secret,
    redirect_uris: o.redirects,
    response_types: ['code'],
    grant_types: ['authorization_code'],
  }],
  claims: { openid: ['sub'], email: ['email', 'email_verified'] },
  cookies: { keys: ['a key of this run'] },
  features: { devInteractions: { enabled: true } },
  pkce: { methods: ['S256'], required: () => true },
  async findAccount(_, id) {
    return {
      accountId: id,
      async claims() {
        return { sub: id, email: `${id}@example.com`, email_verified: true };
      },
    };
  },
});
provider.on('server_error', (_, err) => console.error(err));

const handle = provider.callback();
createServer({ cert: readFileSync(o.cert), key: readFileSync(o.key) }, (req, res) => {
  console.log(`${req.method} ${new URL(req.url, o.issuer).pathname}`);
  handle(req, res);
}).listen(o.port, '127.0.0.1', () => console.log('ready'));

// Who started this ends it by ending its standard input, in any way.
process.stdin.on('end', () => process.exit(0)).resume();
