package kvevents

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"strconv"

	"github.com/cespare/xxhash/v2"
	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// engineHash is the hash by which an engine names a block. An integer keeps its bits, so that an
// int64 and a uint64 with the same bits are equal. Bytes, which may be longer, are hashed twice,
// the second time with a secret, so that two blocks hardly get equal hashes, be it by chance or on
// purpose.
type engineHash struct {
	bits       uint64 // the integer, or a hash of the bytes
	secretHash uint64 // another hash of the bytes, never 0; 0 for an integer
}

var secret = maphash.MakeSeed()

type kind uint8

const (
	unknownType kind = iota
	blockStored
	blockRemoved
	allCleared
)

// event is one KV event. Its slices are reused for the next event.
type event struct {
	kind          kind
	hashes        []engineHash
	parent        engineHash
	isRoot        bool // the first block starts a prompt, and parent is not set
	tokens        []int32
	blockTokens   int
	lora          string   // empty: none
	loraID        string   // in decimal; empty: null
	medium        string   // memory that holds the blocks, such as GPU; empty: not named
	extraKeys     []string // of each block: empty for none, the key if it is one string, else otherExtraKeys
	group         int64    // number of the group of KV cache layers
	hasGroup      bool
	attentionKind string // of the group, such as full_attention
}

// otherExtraKeys stands for extra keys that are not one string, such as those of pictures.
const otherExtraKeys = "\x00"

// The fields of an event that is an array, after its type. Later versions of vLLM append fields.
var (
	storedFields = []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind"}
	removedFields = []string{"block_hashes", "medium", "group_idx"}
)

// decoder reads the msgpack payloads of batches. Only one goroutine at a time may use it, because
// it reuses its memory.
type decoder struct {
	*msgpack.Decoder
	from    bytes.Reader
	current event
}

func newDecoder() *decoder {
	d := &decoder{}
	d.Decoder = msgpack.NewDecoder(&d.from)
	return d
}

// decodeBatch calls visit for each event, in order, also for those before an error. visit must not
// keep the event, which is reused. ts is the engine's time, in Unix seconds.
func (d *decoder) decodeBatch(payload []byte, visit func(*event)) (ts float64, err error) {
	d.from.Reset(payload)
	d.ResetReader(&d.from)
	n, err := d.DecodeArrayLen()
	if err != nil {
		return 0, fmt.Errorf("kvevents: a batch is no array: %w", err)
	}
	if n < 2 {
		return 0, fmt.Errorf("kvevents: a batch of %d parts; it has a time and events", n)
	}
	if ts, err = d.DecodeFloat64(); err != nil {
		return 0, fmt.Errorf("kvevents: a batch's time: %w", err)
	}
	events, err := d.DecodeArrayLen()
	if err != nil {
		return ts, fmt.Errorf("kvevents: a batch's events: %w", err)
	}
	for i := range events {
		if err := d.decodeEvent(); err != nil {
			return ts, fmt.Errorf("kvevents: event %d: %w", i, err)
		}
		visit(&d.current)
	}
	return ts, nil // the rank and any further parts are not needed
}

func (d *decoder) decodeEvent() error {
	e := &d.current
	*e = event{isRoot: true, hashes: e.hashes[:0], tokens: e.tokens[:0], extraKeys: e.extraKeys[:0]}
	code, err := d.PeekCode()
	if err != nil {
		return err
	}
	if isMap(code) {
		return d.decodeMapEvent()
	}
	return d.decodeArrayEvent()
}

func (d *decoder) decodeMapEvent() error {
	n, err := d.DecodeMapLen()
	if err != nil {
		return err
	}
	for range n {
		key, err := d.readString()
		if err != nil {
			return err
		}
		if err := d.decodeField(key); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

func (d *decoder) decodeArrayEvent() error {
	n, err := d.DecodeArrayLen()
	if err != nil {
		return err
	}
	if n < 1 {
		return errors.New("an array without a tag")
	}
	if err := d.decodeField("type"); err != nil {
		return err
	}
	var fields []string
	switch d.current.kind {
	case blockStored:
		fields = storedFields
	case blockRemoved:
		fields = removedFields
	}
	for i := range n - 1 {
		key := "" // a later version of vLLM has appended this part
		if i < len(fields) {
			key = fields[i]
		}
		if err := d.decodeField(key); err != nil {
			return fmt.Errorf("part %d %s: %w", i+1, key, err)
		}
	}
	return nil
}

// decodeField skips a field that it does not know. In an array, key is empty for an unknown part.
func (d *decoder) decodeField(key string) (err error) {
	e := &d.current
	switch key {
	case "type":
		return d.decodeType()
	case "block_hashes":
		return d.decodeHashes()
	case "parent_block_hash": // null for a block that starts a prompt
		e.parent, e.isRoot, err = d.decodeHash()
		return err
	case "token_ids":
		return d.decodeTokenIDs()
	case "block_size":
		n, err := d.DecodeInt64()
		if err == nil && (n < 1 || n > 1<<20) {
			return fmt.Errorf("%d is no size of a block", n)
		}
		e.blockTokens = int(n)
		return err
	case "lora_id":
		return d.orNil(func() error {
			id, err := d.DecodeInt64()
			e.loraID = strconv.FormatInt(id, 10)
			return err
		})
	case "lora_name":
		return d.orNil(func() error { e.lora, err = d.readString(); return err })
	case "medium":
		return d.orNil(func() error { e.medium, err = d.readString(); return err })
	case "kv_cache_spec_kind":
		return d.orNil(func() error { e.attentionKind, err = d.readString(); return err })
	case "group_idx":
		return d.orNil(func() error { e.group, err = d.DecodeInt64(); e.hasGroup = true; return err })
	case "extra_keys":
		return d.orNil(d.decodeExtraKeys)
	}
	return d.skipValue(outermost)
}

// decodeType leaves unknownType for an unknown type, because later versions of vLLM may add types.
func (d *decoder) decodeType() error {
	name, err := d.readString()
	switch name {
	case "BlockStored":
		d.current.kind = blockStored
	case "BlockRemoved":
		d.current.kind = blockRemoved
	case "AllBlocksCleared":
		d.current.kind = allCleared
	}
	return err
}

func (d *decoder) decodeHashes() error {
	n, err := d.DecodeArrayLen()
	for i := 0; i < n && err == nil; i++ {
		var h engineHash
		h, _, err = d.decodeHash()
		d.current.hashes = append(d.current.hashes, h)
	}
	return err
}

func (d *decoder) decodeTokenIDs() error {
	n, err := d.DecodeArrayLen()
	for i := 0; i < n && err == nil; i++ {
		var id int64
		if id, err = d.DecodeInt64(); err == nil && (id < 0 || id > math.MaxInt32) {
			return fmt.Errorf("%d is no token id", id)
		}
		d.current.tokens = append(d.current.tokens, int32(id))
	}
	return err
}

// orNil calls read unless the next value is null.
func (d *decoder) orNil(read func() error) error {
	code, err := d.PeekCode()
	if err != nil {
		return err
	}
	if code == msgpcode.Nil {
		return d.DecodeNil()
	}
	return read()
}

// decodeHash reads a block's hash, which engines write as an integer, as bytes or as a string.
func (d *decoder) decodeHash() (h engineHash, isNull bool, err error) {
	code, err := d.PeekCode()
	if err != nil {
		return h, false, err
	}
	switch {
	case code == msgpcode.Nil:
		return h, true, d.DecodeNil()
	case msgpcode.IsBin(code) || msgpcode.IsString(code):
		b, err := d.readBinary()
		// Without the second hash, whose secret only this process knows, a sender could construct two
		// blocks with the same hash.
		h = engineHash{bits: xxhash.Sum64(b), secretHash: maphash.Bytes(secret, b) | 1} // never 0, so that no integer has the same hash
		return h, false, err
	}
	n, err := d.DecodeInt64() // also decodes a uint64, without changing its bits
	return engineHash{bits: uint64(n)}, false, err
}

// decodeExtraKeys reads what the engine hashes in addition to each block's tokens.
func (d *decoder) decodeExtraKeys() error {
	n, err := d.DecodeArrayLen()
	for i := 0; i < n && err == nil; i++ {
		keys := "" // stays so for null
		err = d.orNil(func() error {
			keys, err = d.decodeExtraKey()
			return err
		})
		d.current.extraKeys = append(d.current.extraKeys, keys)
	}
	return err
}

func (d *decoder) decodeExtraKey() (string, error) {
	code, err := d.PeekCode()
	if err != nil {
		return "", err
	}
	if !isArray(code) {
		return otherExtraKeys, d.skipValue(outermost)
	}
	n, err := d.DecodeArrayLen()
	if err != nil || n <= 0 {
		return "", err
	}
	code, err = d.PeekCode()
	if err == nil && n == 1 && msgpcode.IsString(code) {
		return d.readString()
	}
	for i := 0; i < n && err == nil; i++ {
		err = d.skipValue(outermost + 1) // the value is in the array of the block's keys
	}
	return otherExtraKeys, err
}

const outermost = 0 // as the depth for skipValue

// skipValue counts in depth the arrays and maps around the value, because the library's Skip has no
// limit on nesting, so that a hostile value could exhaust the stack.
func (d *decoder) skipValue(depth int) error {
	const deepest = 32
	if depth > deepest {
		return fmt.Errorf("nested deeper than %d levels", deepest)
	}
	code, err := d.PeekCode()
	if err != nil {
		return err
	}
	n := 0 // values inside this one
	switch {
	case isArray(code):
		n, err = d.DecodeArrayLen()
	case isMap(code):
		n, err = d.DecodeMapLen()
		n *= 2 // a key and a value for each entry
	case msgpcode.IsString(code) || msgpcode.IsBin(code):
		_, err = d.readBinary()
		return err
	case msgpcode.IsExt(code):
		if _, n, err = d.DecodeExtHeader(); err == nil {
			_, err = d.readBytes(n)
		}
		return err
	default:
		return d.Skip()
	}
	for i := 0; i < n && err == nil; i++ {
		err = d.skipValue(depth + 1)
	}
	return err
}

// readString is empty for null.
func (d *decoder) readString() (string, error) {
	b, err := d.readBinary()
	return string(b), err
}

// readBinary is empty for null.
func (d *decoder) readBinary() ([]byte, error) {
	n, err := d.DecodeBytesLen()
	if err != nil {
		return nil, err
	}
	return d.readBytes(n)
}

// readBytes first checks that n bytes are left, because the library would allocate any announced
// length.
func (d *decoder) readBytes(n int) ([]byte, error) {
	if n > d.from.Len() {
		return nil, fmt.Errorf("%d bytes are announced, %d are left: %w", n, d.from.Len(), io.ErrUnexpectedEOF)
	}
	b := make([]byte, max(0, n)) // n is -1 for null
	_, err := io.ReadFull(&d.from, b)
	return b, err
}

func isArray(code byte) bool {
	return msgpcode.IsFixedArray(code) || code == msgpcode.Array16 || code == msgpcode.Array32
}

func isMap(code byte) bool {
	return msgpcode.IsFixedMap(code) || code == msgpcode.Map16 || code == msgpcode.Map32
}
