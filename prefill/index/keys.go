package index

import (
	"encoding/binary"
	"hash/maphash"

	"github.com/cespare/xxhash/v2"
)

// Key identifies a block together with all of the prompt before it.
type Key struct {
	Hash  uint64 // xxhash64 of the previous block's Hash and this block's bytes: the same in every process
	Check uint64 // a hash with a secret of this process, so that a client cannot make two prompts with one Key
}

// keyVersion must change whenever the rendering of prompts or the computation of hashes changes.
const keyVersion = "evenkeel-1"

var secret = maphash.MakeSeed()

// Scope holds the properties that two prompts must have in common to share blocks.
type Scope struct {
	Model, LoRA string
	Weights     uint32 // Route.Weights of the adapter
	Salt        string // cache_salt of the request
	Tenant      string // isolation key of the tenant, so that tenants share no blocks
}

// Root is the key that stands before a prompt's first block. It depends on the unit and on the size of a block, so that blocks of different
// units or sizes never have the same key.
func (s Scope) Root(unit Unit, block int) Key {
	var scratch [256]byte
	buf := append(scratch[:0], keyVersion...)
	buf = append(buf, byte(unit))
	buf = binary.LittleEndian.AppendUint64(buf, uint64(block))
	for _, part := range [...]string{s.Model, s.LoRA, s.Salt, s.Tenant} { // with its length, so that no two scopes have the same bytes
		buf = binary.LittleEndian.AppendUint64(buf, uint64(len(part)))
		buf = append(buf, part...)
	}
	if s.Weights != 0 {
		buf = binary.LittleEndian.AppendUint32(buf, s.Weights)
	}
	return Key{Hash: xxhash.Sum64(buf), Check: maphash.Bytes(secret, buf)}
}

// Fingerprint is a hash of text with a secret of this process, so that clients cannot make two texts with one hash.
func Fingerprint(text []byte) uint64 { return maphash.Bytes(secret, text) }

// Unit says whether the size of a block counts bytes or token ids.
type Unit byte

// The units: a block has a number of bytes of the rendered prompt, or a number of token ids.
const (
	Bytes  Unit = 'b'
	Tokens Unit = 't'
)

// BlockBytes is the size of a block of rendered bytes, about 64 tokens. A prompt of 128,000 tokens then has only 2,000
// blocks, and a shared system prompt of a few hundred tokens still has several.
const BlockBytes = 256

// Hasher turns prompts into keys. It can be reused, by one goroutine at a time. The keys that it returns stay valid.
type Hasher struct {
	buf    []byte // check and hash of the previous block, then the bytes of the present block
	filled int    // bytes of buf that are set
	keys   []Key
	total  int  // bytes of the prompt so far
	media  bool // the prompt has a part that is not text
}

// parentKeyBytes is the size of the previous block's key, which stands at the front of buf: first its Check, then its Hash.
const (
	parentKeyBytes   = 16
	parentCheckBytes = 8
)

// start begins a prompt. The keys are appended to dst, and root is the key before the first block. A block has blockBytes bytes.
func (h *Hasher) start(dst []Key, root Key, blockBytes int) {
	if cap(h.buf) < parentKeyBytes+blockBytes { // this is the first prompt, or all earlier ones had smaller blocks
		h.buf = make([]byte, parentKeyBytes+blockBytes)
	}
	h.buf = h.buf[:parentKeyBytes+blockBytes]
	h.keys, h.filled, h.total, h.media = dst, parentKeyBytes, 0, false
	h.startBlock(root)
}

// startBlock puts a block's key before the bytes of the next block, so that the next key covers it.
func (h *Hasher) startBlock(k Key) {
	binary.LittleEndian.PutUint64(h.buf, k.Check)
	binary.LittleEndian.PutUint64(h.buf[parentCheckBytes:], k.Hash)
	h.filled = parentKeyBytes
}

// write adds bytes of the prompt, and makes a key whenever a block is full.
func (h *Hasher) write(p []byte) {
	h.total += len(p)
	for {
		n := copy(h.buf[h.filled:], p)
		h.filled += n
		if h.filled < len(h.buf) { // all of p is copied, and the block is not full yet
			return
		}
		h.endBlock()
		p = p[n:]
	}
}

// writeByte adds one byte of the prompt, as write does.
func (h *Hasher) writeByte(c byte) {
	h.total++
	h.buf[h.filled] = c
	if h.filled++; h.filled == len(h.buf) {
		h.endBlock()
	}
}

// endBlock makes the key of the block, which is full, and begins the next one. buf has the Check and the Hash of the previous block, and
// then this block. Check covers all of it. Hash leaves out the previous Check, which each process computes with its own
// secret, because Hash must be the same in every process.
func (h *Hasher) endBlock() {
	k := Key{Hash: xxhash.Sum64(h.buf[parentCheckBytes:]), Check: maphash.Bytes(secret, h.buf)}
	h.keys = append(h.keys, k)
	h.startBlock(k)
}

// end returns the keys. An incomplete last block has no key.
func (h *Hasher) end() []Key {
	keys := h.keys
	h.keys = nil
	return keys
}

// Tokens appends the keys of the token ids, in blocks of block tokens; an incomplete last block has no key. prev is the
// scope's root, or the key of the block before ids.
func (h *Hasher) Tokens(dst []Key, prev Key, ids []int32, block int) []Key {
	const idBytes = 4
	h.start(dst, prev, idBytes*block)
	for ; len(ids) >= block; ids = ids[block:] {
		for i, id := range ids[:block] {
			binary.LittleEndian.PutUint32(h.buf[parentKeyBytes+idBytes*i:], uint32(id))
		}
		h.endBlock()
	}
	return h.end()
}

// Salts recognises cache salts that several requests share. A request whose salt was not seen lately should not be
// indexed: its salt was probably made for this request alone, and then no later request can hit its blocks.
type Salts struct {
	seen [4096]uint64 // hashes of salts, by their top 12 bits; a newer salt overwrites an older one
}

// Shared reports whether an earlier request had this salt, and remembers the salt. For a request without a salt it is true, because all
// such requests share their blocks. The answer is approximate: Salts forgets a salt when another salt takes its cell, and two salts with
// the same hash count as one.
func (s *Salts) Shared(salt string) bool {
	if salt == "" {
		return true
	}
	h := maphash.String(secret, salt) | 1 // never 0, which is an empty cell
	cell := &s.seen[h>>52]                // by the top 12 bits
	if *cell == h {
		return true
	}
	*cell = h // the salt that had this cell is forgotten
	return false
}
