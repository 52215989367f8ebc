package cache

import (
	"bytes"
	"encoding/binary"
	"math"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
	"github.com/vmihailenco/msgpack/v5"
)

// Events publishes what a rank's prefix cache stores and drops, as vLLM does:
// batches to subscribers, and the last of them again to who asks.
// A restart begins anew at 0.
type Events struct {
	Rank  int
	Maps  bool          // events are maps, as in vLLM 0.32; else arrays, as up to 2026
	HWM   int           // batches that a subscriber may be behind before it loses some
	Delay time.Duration // of each batch on its way to a subscriber

	mu   sync.Mutex
	next uint64
	kept [][]byte // the last batches, the newest is next-1
	subs map[chan batch]struct{}
}

type batch struct {
	seq     uint64
	payload []byte
}

const keptBatches = 10_000

// run is a row of blocks that were stored one behind the other.
type run struct {
	parent uint64 // chainStart: none
	hashes []uint64
	ids    []int32
}

// changed publishes one batch. A subscriber that is too far behind loses it.
func (k *Events) changed(removed []uint64, stored []run, cleared bool) {
	if k == nil || len(removed) == 0 && len(stored) == 0 && !cleared {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	b := batch{k.next, k.encode(removed, stored, cleared)}
	k.next++
	k.kept = append(k.kept, b.payload)
	if len(k.kept) > keptBatches {
		k.kept = append([][]byte(nil), k.kept[keptBatches/2:]...)
	}
	for sub := range k.subs {
		select {
		case sub <- b:
		default:
		}
	}
}

// since are the kept batches from one on.
func (k *Events) since(seq uint64) (batches []batch) {
	k.mu.Lock()
	defer k.mu.Unlock()
	oldest := k.next - uint64(len(k.kept))
	for seq = max(seq, oldest); seq < k.next; seq++ {
		batches = append(batches, batch{seq, k.kept[seq-oldest]})
	}
	return batches
}

// member is one of an event. Arrays have no names.
type member struct {
	name  string
	value any
}

func (k *Events) encode(removed []uint64, stored []run, cleared bool) []byte {
	var out bytes.Buffer
	e := msgpack.NewEncoder(&out) // a buffer takes everything
	e.UseCompactInts(true)
	n := len(stored)
	if len(removed) > 0 {
		n++
	}
	if cleared {
		n++
	}
	_ = e.EncodeArrayLen(3)
	_ = e.EncodeFloat64(float64(time.Now().UnixMicro()) / 1e6)
	_ = e.EncodeArrayLen(n)
	medium, group := member{"medium", "GPU"}, member{"group_idx", 0} // the only group there is
	if cleared {
		k.event(e, "AllBlocksCleared", nil)
	}
	if len(removed) > 0 {
		k.event(e, "BlockRemoved", []member{{"block_hashes", k.hashes(removed...)}, medium}, group)
	}
	for _, r := range stored {
		var parent any
		if r.parent != chainStart {
			parent = k.hashes(r.parent)[0]
		}
		k.event(e, "BlockStored", []member{
			{"block_hashes", k.hashes(r.hashes...)}, {"parent_block_hash", parent}, {"token_ids", r.ids}, {"block_size", BlockSize},
			{"lora_id", nil}, medium,
		}, member{"lora_name", nil}, member{"extra_keys", make([]any, len(r.hashes))}, group, member{"kv_cache_spec_kind", "full_attention"})
	}
	_ = e.EncodeInt(int64(k.Rank))
	return out.Bytes()
}

// event writes an event. Its last members are only in maps.
func (k *Events) event(e *msgpack.Encoder, kind string, members []member, inMaps ...member) {
	if k.Maps {
		members = append(members, inMaps...)
		_ = e.EncodeMapLen(len(members) + 1)
		_ = e.EncodeString("type")
	} else {
		_ = e.EncodeArrayLen(len(members) + 1)
	}
	_ = e.EncodeString(kind)
	for _, m := range members {
		if k.Maps {
			_ = e.EncodeString(m.name)
		}
		_ = e.Encode(m.value)
	}
}

// hashes are unsigned in maps and signed in arrays.
func (k *Events) hashes(of ...uint64) []any {
	list := make([]any, len(of))
	for i, h := range of {
		if list[i] = h; !k.Maps {
			list[i] = int64(h)
		}
	}
	return list
}

// Published counts the batches there were; those of nil are none.
func (k *Events) Published() int64 {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return int64(k.next)
}

// Publish sends batches to a subscriber until it leaves, or the connection is closed.
func (k *Events) Publish(conn net.Conn) {
	z, err := zmq4.Open(conn, null.Security(), zmq4.Pub, nil, true, nil)
	if err != nil {
		return
	}
	first, err := z.RecvMsg()
	if err != nil || len(first.Frames) != 1 || len(first.Frames[0]) == 0 || first.Frames[0][0] != 1 ||
		!strings.HasPrefix(kvTopic, string(first.Frames[0][1:])) {
		return // no subscription to what there is
	}
	sub := make(chan batch, k.HWM)
	k.mu.Lock()
	if k.subs == nil {
		k.subs = map[chan batch]struct{}{}
	}
	k.subs[sub] = struct{}{}
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		delete(k.subs, sub)
		k.mu.Unlock()
	}()
	left := make(chan struct{})
	go func() { // what else it says does not matter, that it leaves does
		defer close(left)
		for {
			if _, err := z.RecvMsg(); err != nil {
				return
			}
		}
	}()
	for {
		select {
		case b := <-sub:
			if k.Delay > 0 {
				select {
				case <-time.After(k.Delay):
				case <-left:
				}
			}
			if z.SendMsg(zmq4.NewMsgFrom([]byte(kvTopic), binary.BigEndian.AppendUint64(nil, b.seq), b.payload)) != nil {
				_ = z.Close()
			}
		case <-left:
			return
		}
	}
}

const kvTopic = "" // the default of vLLM's setting

// Replay answers who asks for batches until they leave.
func (k *Events) Replay(conn net.Conn) {
	z, err := zmq4.Open(conn, null.Security(), zmq4.Router, nil, true, nil)
	if err != nil {
		return
	}
	for {
		ask, err := z.RecvMsg()
		if err != nil || len(ask.Frames) != 2 || len(ask.Frames[1]) != 8 {
			return
		}
		for _, b := range k.since(binary.BigEndian.Uint64(ask.Frames[1])) {
			if z.SendMsg(zmq4.NewMsgFrom(nil, []byte(kvTopic), binary.BigEndian.AppendUint64(nil, b.seq), b.payload)) != nil {
				return
			}
		}
		if z.SendMsg(zmq4.NewMsgFrom(nil, nil, binary.BigEndian.AppendUint64(nil, math.MaxUint64), nil)) != nil {
			return
		}
	}
}
