// Package keys holds the API keys of the callers, as SHA-256 hashes, and the
// rights and limits of each key.
//
// The file is YAML; unknown names are refused:
//
//	keys:
//	  - name: research            # in logs and metrics; unique
//	    sha256: 9f86d081...       # 64 hex digits, of the whole key; unique
//	    trusted: true             # may send x-evenkeel-* headers (default false)
//	    priority: 0               # of its requests, -100 to 100; higher ones are served first (default 0)
//	    batch: true               # its requests take only what others leave, whatever their priority (default false)
//	    max_concurrent: 64        # answers at once, else 429 (default 0: no limit); n: 4 counts as four
//	    rpm: 600                  # requests a minute, refused ones too (default 0: no limit)
//	    tpm: 1000000              # tokens a minute, of prompts and answers (default 0: no limit)
//
// `evenkeel keys new` makes a key and the entry for it. Such a key has 256
// random bits, too many to guess. Therefore one fast hash is enough. A slow hash
// would delay every request.
package keys

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"sync/atomic"
	"time"
)

// Key is the entry of one caller in the key file. The zero Key stands for every caller if no key is
// needed: it has no name and no limits, and is not trusted.
type Key struct {
	Name          string
	Trusted       bool
	Priority      int
	Batch         bool
	MaxConcurrent int // answers at once; 0: no limit
	RPM           int // requests per minute; 0: no limit
	TPM           int // tokens per minute, of prompts and answers; 0: no limit

	usage *usage // shared by all copies of the Key, also across reloads of the file; nil in the zero Key
}

// MaxPriority is the highest priority; -MaxPriority is the lowest.
const MaxPriority = 100

// usage is how much a key has used of its limits.
type usage struct {
	running          atomic.Int64
	requests, tokens bucket
}

// TakeRequest counts one request against the key's requests per minute. If none is left, ok is
// false, and wait is the time until the next one is free. The caller then answers 429.
func (k Key) TakeRequest(now time.Time) (wait time.Duration, ok bool) {
	if k.usage == nil || k.RPM == 0 { // the key has no limit
		return 0, true
	}
	return k.usage.requests.take(now, k.RPM, 1)
}

// TakeTokens counts n tokens, the expected cost of a request, against the key's tokens per minute.
// If too few are left, it counts none, ok is false, and wait is the time until enough are free.
// AdjustTokens corrects the number later.
func (k Key) TakeTokens(now time.Time, n int) (wait time.Duration, ok bool) {
	if k.usage == nil || k.TPM == 0 { // the key has no limit
		return 0, true
	}
	return k.usage.tokens.take(now, k.TPM, n)
}

// AdjustTokens corrects the estimate that TakeTokens has counted, once the real number of tokens is
// known: n is the difference. Below 0, it gives tokens back. It never fails, so a key may go into
// debt.
func (k Key) AdjustTokens(now time.Time, n int) {
	if k.usage != nil && k.TPM > 0 { // otherwise the key has no limit, and TakeTokens has counted nothing
		k.usage.tokens.adjust(now, k.TPM, n)
	}
}

// Acquire counts n more running answers of this key. If that would be more than MaxConcurrent, it
// counts none and ok is false, and the caller answers 429. Release takes them off again.
func (k Key) Acquire(n int) (ok bool) {
	if k.usage == nil { // the zero Key has no limits
		return true
	}
	if n == 0 { // nothing is added, so this is allowed even if MaxConcurrent was lowered below the number of running answers
		return true
	}
	for { // until no other request has changed the number between Load and CompareAndSwap
		running := k.usage.running.Load()
		if k.MaxConcurrent > 0 && running+int64(n) > int64(k.MaxConcurrent) {
			return false
		}
		if k.usage.running.CompareAndSwap(running, running+int64(n)) {
			return true
		}
	}
}

// Release ends n answers that Acquire counted.
func (k Key) Release(n int) {
	if k.usage != nil {
		k.usage.running.Add(-int64(n))
	}
}

// Set has the keys of a key file, and does not change after KeepUsageOf. The zero Set needs no key.
type Set struct {
	required bool
	hashes   [][sha256.Size]byte // keys[i] is the entry of hashes[i]
	keys     []Key
}

// Required says whether a request needs a key at all.
func (s *Set) Required() bool { return s.required }

// KeepUsageOf takes over from old, the last version of the file, what each key has used of its
// limits. It finds a key by its name, so the hash and the limits of a key may be new. Call it
// before the set is used.
func (s *Set) KeepUsageOf(old *Set) {
	usageOf := make(map[string]*usage, len(old.keys))
	for _, k := range old.keys {
		usageOf[k.Name] = k.usage
	}
	for i, k := range s.keys {
		if usage, ok := usageOf[k.Name]; ok {
			s.keys[i].usage = usage
		}
	}
}

// Authenticate finds the key in an Authorization header, "Bearer KEY". See Find.
func (s *Set) Authenticate(authorization []byte) (key Key, ok bool) {
	secret, _ := bearer(authorization)
	return s.Find(secret)
}

// Find finds the key of a secret. ok is false if the secret is missing or unknown; the caller
// answers 401. If no key is required, every caller gets the zero Key.
//
// It compares the secret with every hash in constant time. The time therefore shows neither how
// close a secret came nor where its key stands in the file.
func (s *Set) Find(secret []byte) (key Key, ok bool) {
	if !s.required {
		return Key{}, true
	}
	if len(secret) == 0 {
		return Key{}, false
	}
	sum := sha256.Sum256(secret)
	index := -1 // of the key in the set; -1: no hash is equal
	for i := range s.hashes {
		isEqual := subtle.ConstantTimeCompare(sum[:], s.hashes[i][:]) // 1 or 0
		index = subtle.ConstantTimeSelect(isEqual, i, index)
	}
	if index < 0 {
		return Key{}, false
	}
	return s.keys[index], true
}

// bearer returns the credentials of the Bearer scheme, whose name may be in upper or lower case. ok
// is false if the header has another scheme, or no credentials.
func bearer(authorization []byte) (secret []byte, ok bool) {
	const scheme = "bearer "
	if len(authorization) <= len(scheme) || !bytes.EqualFold(authorization[:len(scheme)], []byte(scheme)) {
		return nil, false
	}
	secret = bytes.TrimLeft(authorization[len(scheme):], " ")
	return secret, len(secret) > 0
}

// Hash returns the hash of a key as the file holds it.
func Hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}
