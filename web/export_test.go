package web

import "crypto/tls"

// ConfigOf is a TLS server's with a certificate.
func ConfigOf(c *Certificate) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: c.get, NextProtos: []string{"http/1.1"}}
}

// HoldClients has n requests of the client API count as being served.
func HoldClients(n *Nodes, requests int64) { n.api.held.Add(requests) }

// HoldHandshakes takes n of the handshakes that may run at once, and gives them
// back.
func HoldHandshakes(n *Nodes, k int) (free func()) {
	for range k {
		n.handshakes <- struct{}{}
	}
	return func() {
		for range k {
			<-n.handshakes
		}
	}
}
