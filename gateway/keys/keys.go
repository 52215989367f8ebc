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

	use *use // shared by all copies of the Key, in later versions of the file too; nil in the zero Key
}

// MaxPriority bounds priorities, above and below 0.
const MaxPriority = 100

// use is what a key takes of its limits.
type use struct {
	running          atomic.Int64
	requests, tokens bucket
}

// Request takes one request of the key's minute, or tells how long until there
// is one: answer 429.
func (k Key) Request(now time.Time) (wait time.Duration, ok bool) {
	if k.use == nil || k.RPM == 0 {
		return 0, true
	}
	return k.use.requests.take(now, k.RPM, 1)
}

// Tokens takes what a request is expected to cost of the key's minute; Settle
// takes the rest once it is known.
func (k Key) Tokens(now time.Time, n int) (wait time.Duration, ok bool) {
	if k.use == nil || k.TPM == 0 {
		return 0, true
	}
	return k.use.tokens.take(now, k.TPM, n)
}

// Settle takes n more tokens than Tokens did, or gives some back.
func (k Key) Settle(now time.Time, n int) {
	if k.use != nil && k.TPM > 0 {
		k.use.tokens.settle(now, k.TPM, n)
	}
}

// Acquire books n more answers for this key; false when that makes more than
// MaxConcurrent: answer 429. What was booked is given back by Release.
func (k Key) Acquire(n int) bool {
	if k.use == nil || n == 0 { // nothing more is allowed above a limit that was lowered, too
		return true
	}
	if now := k.use.running.Add(int64(n)); k.MaxConcurrent > 0 && now > int64(k.MaxConcurrent) {
		k.use.running.Add(-int64(n))
		return false
	}
	return true
}

// Release gives n answers back that Acquire booked.
func (k Key) Release(n int) {
	if k.use != nil {
		k.use.running.Add(-int64(n))
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

// Succeed takes over from old, the file's last version: a key that keeps its
// name keeps what it has taken, though its hash or its limits may be new.
// Call it before the set is used.
func (s *Set) Succeed(old *Set) {
	taken := make(map[string]*use, len(old.keys))
	for _, k := range old.keys {
		taken[k.Name] = k.use
	}
	for i, k := range s.keys {
		if u, ok := taken[k.Name]; ok {
			s.keys[i].use = u
		}
	}
}

// Authenticate finds the key of an Authorization header, "Bearer KEY", as Find does.
func (s *Set) Authenticate(authorization []byte) (key Key, ok bool) {
	secret, _ := bearer(authorization)
	return s.Find(secret)
}

// Find finds a key. ok is false for a missing or unknown one: answer 401. When no key
// is required everybody is the zero Key.
//
// It compares with every hash, each in constant time: how long it takes tells
// neither which key came close nor where one stands in the file.
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
