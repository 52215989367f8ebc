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

// Scope is what two prompts must have in common to share blocks.
type Scope struct {
	Model, LoRA string
	Weights     uint32 // Route.Weights of the adapter
	Salt        string // cache_salt of the request
	Tenant      string // isolation key, so that tenants share no blocks
}

// Root is the key that stands before a prompt's first block. Blocks of different units or sizes
// never have the same key.
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

// Fingerprint uses a secret of this process, so that clients cannot make two texts with one hash.
func Fingerprint(text []byte) uint64 { return maphash.Bytes(secret, text) }

// Unit says whether the size of a block counts bytes of the rendered prompt, or token ids.
type Unit byte

const (
	Bytes  Unit = 'b'
	Tokens Unit = 't'
)

// BlockBytes is about 64 tokens. A prompt of 128,000 tokens then has only 2,000 blocks, and a
// shared system prompt of a few hundred tokens still has several.
const BlockBytes = 256

// Hasher turns prompts into keys. One goroutine at a time may use it. Its keys stay valid.
type Hasher struct {
	buf    []byte // check and hash of the previous block, then the bytes of this block
	filled int    // bytes of buf
	keys   []Key
	total  int  // bytes of the prompt so far
	media  bool // the prompt has a part that is not text
}

// buf begins with the previous block's Check, and then its Hash.
const (
	parentKeyBytes   = 16
	parentCheckBytes = 8
)

// start begins a prompt. The keys are appended to dst; root is the key before the first block.
func (h *Hasher) start(dst []Key, root Key, blockBytes int) {
	if cap(h.buf) < parentKeyBytes+blockBytes {
		h.buf = make([]byte, parentKeyBytes+blockBytes)
	}
	h.buf = h.buf[:parentKeyBytes+blockBytes]
	h.keys, h.filled, h.total, h.media = dst, parentKeyBytes, 0, false
	h.startBlock(root)
}

func (h *Hasher) startBlock(k Key) {
	binary.LittleEndian.PutUint64(h.buf, k.Check)
	binary.LittleEndian.PutUint64(h.buf[parentCheckBytes:], k.Hash)
	h.filled = parentKeyBytes
}

func (h *Hasher) write(p []byte) {
	h.total += len(p)
	for {
		n := copy(h.buf[h.filled:], p)
		h.filled += n
		if h.filled < len(h.buf) {
			return
		}
		h.endBlock()
		p = p[n:]
	}
}

func (h *Hasher) writeByte(c byte) {
	h.total++
	h.buf[h.filled] = c
	if h.filled++; h.filled == len(h.buf) {
		h.endBlock()
	}
}

// endBlock makes the key of a full block, and begins the next one. Hash leaves out the previous
// Check, which has this process's secret, because Hash must be the same in every process.
func (h *Hasher) endBlock() {
	k := Key{Hash: xxhash.Sum64(h.buf[parentCheckBytes:]), Check: maphash.Bytes(secret, h.buf)}
	h.keys = append(h.keys, k)
	h.startBlock(k)
}

// end returns the keys. An incomplete last block has none.
func (h *Hasher) end() []Key {
	keys := h.keys
	h.keys = nil
	return keys
}

// Tokens appends the keys of token ids, in blocks of block tokens. prev is the scope's root, or the
// key of the block before ids.
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

// Salts recognises cache salts that several requests share. A request whose salt was not seen
// lately should not be indexed: the salt was probably made for it alone, and no later request can
// hit its blocks.
type Salts struct {
	seen [4096]uint64 // hashes of salts, by their top 12 bits; a newer salt overwrites an older one
}

// Shared reports whether an earlier request had this salt, and remembers it. It is true without a
// salt, because all such requests share their blocks. It is approximate: two salts with the same
// hash count as one.
func (s *Salts) Shared(salt string) bool {
	if salt == "" {
		return true
	}
	h := maphash.String(secret, salt) | 1 // 0 is an empty cell
	cell := &s.seen[h>>52]                // the top 12 bits
	if *cell == h {
		return true
	}
	*cell = h
	return false
}
