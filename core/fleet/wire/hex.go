package wire

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
)

// Lengths in bytes of what is written as hex.
const (
	IDLen        = 16 // of nodes, hubs, commands, incarnations, desired states, jobs, reservations
	WorkloadLen  = 8
	NonceLen     = 32
	KeyLen       = 32 // of an ed25519 public key
	SignatureLen = 64
	DigestLen    = 32 // of a sha256
	TokenLen     = 32
)

// NewID draws an identifier.
func NewID() string { return NewHex(IDLen) }

// NewHex draws n bytes and writes them as hex.
func NewHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails (crypto/rand)
	return hex.EncodeToString(b)
}

// IsHex says whether s is exactly n bytes as lowercase hex.
func IsHex(s string, n int) bool {
	if len(s) != 2*n {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// ParseHex decodes s, which must be exactly n bytes as lowercase hex. What is
// named in the error is the field: s itself may be a secret.
func ParseHex(field, s string, n int) ([]byte, error) {
	if err := checkHex(field, s, n); err != nil {
		return nil, err
	}
	return hex.DecodeString(s)
}

func checkHex(field, s string, n int) error {
	if !IsHex(s, n) {
		return fmt.Errorf("%s is not %d lowercase hex digits", field, 2*n)
	}
	return nil
}

func optHex(field, s string, n int) error {
	if s == "" {
		return nil
	}
	return checkHex(field, s, n)
}
