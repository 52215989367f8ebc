// Package keys knows who may use the proxy: API keys, of which it holds only
// the SHA-256, and what each is allowed.
//
// The file is YAML; unknown names are refused:
//
//	keys:
//	  - name: research            # in logs and metrics; unique
//	    sha256: 9f86d081...       # 64 hex digits, of the whole key; unique
//	    trusted: true             # may send x-evenkeel-* headers (default false)
//	    priority: 0               # of its requests, -100 to 100; higher ones are served first (default 0)
//	    batch: true               # its requests take only what others leave, whatever their priority (default false)
//	    max_concurrent: 64        # answers at once, 429 beyond (default 0: no limit); n: 4 counts as four
//	    rpm: 600                  # requests a minute, refused ones too (default 0: no limit)
//	    tpm: 1000000              # tokens a minute, of prompts and answers (default 0: no limit)
//
// `evenkeel keys new` makes a key and the entry for it. Keys made so have 256
// random bits, which is why one plain hash is enough: there is nothing to
// guess, and a slow hash would be paid by every request.
package keys

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"sync/atomic"
	"time"
)

// Key is a caller: the entry its API key stands for. The zero Key is everybody
// when no key is needed: no name, not trusted, no limit.
type Key struct {
	Name          string
	Trusted       bool
	Priority      int
	Batch         bool
	MaxConcurrent int // 0: no limit, as in the next two
	RPM           int // requests a minute
	TPM           int // tokens a minute

	usage *usage // shared by all copies of the Key, in later versions of the file too; nil in the zero Key
}

// MaxPriority bounds priorities, above and below 0.
const MaxPriority = 100

// usage is how much a key has used of its limits.
type usage struct {
	running          atomic.Int64
	requests, tokens bucket
}

// Request takes one request of the key's requests per minute. If none is left, ok is false and wait is how long until
// there is one: the answer is a 429.
func (k Key) Request(now time.Time) (wait time.Duration, ok bool) {
	if k.usage == nil || k.RPM == 0 {
		return 0, true
	}
	return k.usage.requests.take(now, k.RPM, 1)
}

// Tokens takes the n tokens that a request is expected to cost from the key's tokens per minute. If they are not left,
// ok is false and wait is how long until they are. Settle corrects the number once it is known.
func (k Key) Tokens(now time.Time, n int) (wait time.Duration, ok bool) {
	if k.usage == nil || k.TPM == 0 {
		return 0, true
	}
	return k.usage.tokens.take(now, k.TPM, n)
}

// Settle takes n more tokens than Tokens did, or gives some back.
func (k Key) Settle(now time.Time, n int) {
	if k.usage != nil && k.TPM > 0 {
		k.usage.tokens.settle(now, k.TPM, n)
	}
}

// Acquire books n more answers that run for this key; false: that would be more than MaxConcurrent, and the answer is a
// 429. Release gives back what was booked.
func (k Key) Acquire(n int) bool {
	if k.usage == nil || n == 0 { // nothing more is allowed above a limit that was lowered, too
		return true
	}
	if now := k.usage.running.Add(int64(n)); k.MaxConcurrent > 0 && now > int64(k.MaxConcurrent) {
		k.usage.running.Add(-int64(n))
		return false
	}
	return true
}

// Release gives n answers back that Acquire booked.
func (k Key) Release(n int) {
	if k.usage != nil {
		k.usage.running.Add(-int64(n))
	}
}

// Set is what a key file holds, read only. The zero Set needs no key.
type Set struct {
	required bool
	hashes   [][sha256.Size]byte // keys[i] is the entry of hashes[i]
	keys     []Key
}

// Required says whether a request needs a key at all.
func (s *Set) Required() bool { return s.required }

// Len returns the number of keys.
func (s *Set) Len() int { return len(s.keys) }

// Succeed takes over from old, the last version of the file: a key that keeps its name keeps what it has used of its
// limits, although its hash or its limits may be new. It must be called before the set is used.
func (s *Set) Succeed(old *Set) {
	taken := make(map[string]*usage, len(old.keys))
	for _, k := range old.keys {
		taken[k.Name] = k.usage
	}
	for i, k := range s.keys {
		if usage, ok := taken[k.Name]; ok {
			s.keys[i].usage = usage
		}
	}
}

// Authenticate finds the key of an Authorization header, "Bearer KEY", as Find does.
func (s *Set) Authenticate(authorization []byte) (key Key, ok bool) {
	secret, _ := bearer(authorization)
	return s.Find(secret)
}

// Find finds the key of a secret. ok is false if the secret is missing or unknown: the answer is a 401. If no key is
// required, every caller is the zero Key.
//
// It compares the secret with every hash, each in constant time, so that the time shows neither which key came close
// nor where a key stands in the file.
func (s *Set) Find(secret []byte) (key Key, ok bool) {
	if !s.required {
		return Key{}, true
	}
	if len(secret) == 0 {
		return Key{}, false
	}
	sum := sha256.Sum256(secret)
	found := -1
	for i := range s.hashes {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum[:], s.hashes[i][:]), i, found)
	}
	if found < 0 {
		return Key{}, false
	}
	return s.keys[found], true
}

// bearer returns the credentials of the Bearer scheme, whose name has no case.
func bearer(authorization []byte) ([]byte, bool) {
	const scheme = "bearer "
	if len(authorization) <= len(scheme) || !bytes.EqualFold(authorization[:len(scheme)], []byte(scheme)) {
		return nil, false
	}
	secret := bytes.TrimLeft(authorization[len(scheme):], " ")
	return secret, len(secret) > 0
}

// Hash returns the hash of a key as the file holds it.
func Hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}
