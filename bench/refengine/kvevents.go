package refengine

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

// kvEvents publishes what a rank's prefix cache stores and drops, as vLLM does:
// batches to subscribers, and the last of them again to who asks.
// A restart begins anew at 0.
type kvEvents struct {
	cfg  Config
	rank int

	mu   sync.Mutex
	next uint64
	kept [][]byte // the last batches, the newest is next-1
	subs map[chan kvBatch]struct{}
}

type kvBatch struct {
	seq     uint64
	payload []byte
}

const keptBatches = 10_000

func newKVEvents(cfg Config, rank int) *kvEvents {
	return &kvEvents{cfg: cfg, rank: rank, subs: map[chan kvBatch]struct{}{}}
}

// kvRun is a row of blocks that were stored one behind the other.
type kvRun struct {
	parent uint64 // chainStart: none
	hashes []uint64
	ids    []int32
}

// changed publishes one batch. A subscriber that is too far behind loses it.
func (k *kvEvents) changed(removed []uint64, stored []kvRun, cleared bool) {
	if k == nil || len(removed) == 0 && len(stored) == 0 && !cleared {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	b := kvBatch{k.next, k.encode(removed, stored, cleared)}
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
func (k *kvEvents) since(seq uint64) (batches []kvBatch) {
	k.mu.Lock()
	defer k.mu.Unlock()
	oldest := k.next - uint64(len(k.kept))
	for seq = max(seq, oldest); seq < k.next; seq++ {
		batches = append(batches, kvBatch{seq, k.kept[seq-oldest]})
	}
	return batches
}

// kvEncoder writes one event after the other: arrays with a tag and int64
// hashes, as up to 2026, or maps with uint64 hashes and more members, as vLLM 0.32.
type kvEncoder struct {
	*msgpack.Encoder
	maps bool
}

func (k *kvEvents) encode(removed []uint64, stored []kvRun, cleared bool) []byte {
	var out bytes.Buffer
	e := kvEncoder{msgpack.NewEncoder(&out), k.cfg.KVEventsEncoding == "map"}
	e.array(3)
	_ = e.EncodeFloat64(float64(time.Now().UnixMicro()) / 1e6) // a buffer takes everything
	n := len(stored)
	if len(removed) > 0 {
		n++
	}
	if cleared {
		n++
	}
	e.array(n)
	if cleared {
		e.event("AllBlocksCleared", 0, 0)
	}
	if len(removed) > 0 {
		e.event("BlockRemoved", 2, 3)
		e.hashes("block_hashes", removed)
		e.text("medium", "GPU")
		e.group()
	}
	for _, run := range stored {
		e.event("BlockStored", 6, 10)
		e.hashes("block_hashes", run.hashes)
		e.key("parent_block_hash")
		if run.parent == chainStart {
			_ = e.EncodeNil()
		} else {
			e.hash(run.parent)
		}
		e.key("token_ids")
		e.array(len(run.ids))
		for _, id := range run.ids {
			_ = e.EncodeInt(int64(id))
		}
		e.key("block_size")
		_ = e.EncodeInt(blockSize)
		e.key("lora_id")
		_ = e.EncodeNil()
		e.text("medium", "GPU")
		if e.maps {
			e.key("lora_name")
			_ = e.EncodeNil()
			e.key("extra_keys")
			e.array(len(run.hashes))
			for range run.hashes {
				_ = e.EncodeNil()
			}
			e.group()
			e.text("kv_cache_spec_kind", "full_attention")
		}
	}
	_ = e.EncodeInt(int64(k.rank))
	return out.Bytes()
}

func (e kvEncoder) array(n int) { _ = e.EncodeArrayLen(n) }

// event opens an event of so many members beside its type, as an array or as a map.
func (e kvEncoder) event(name string, array, members int) {
	if e.maps {
		_ = e.EncodeMapLen(members + 1)
		e.key("type")
	} else {
		e.array(array + 1)
	}
	_ = e.EncodeString(name)
}

// key names the next member, where members have names.
func (e kvEncoder) key(name string) {
	if e.maps {
		_ = e.EncodeString(name)
	}
}

// group names the only KV cache group there is, where members have names.
func (e kvEncoder) group() {
	if e.maps {
		e.key("group_idx")
		_ = e.EncodeInt(0)
	}
}

func (e kvEncoder) text(key, value string) {
	e.key(key)
	_ = e.EncodeString(value)
}

func (e kvEncoder) hashes(key string, hashes []uint64) {
	e.key(key)
	e.array(len(hashes))
	for _, h := range hashes {
		e.hash(h)
	}
}

func (e kvEncoder) hash(h uint64) {
	if e.maps {
		_ = e.EncodeUint(h)
		return
	}
	_ = e.EncodeInt(int64(h))
}

// published counts the batches there were; those of nil are none.
func (k *kvEvents) published() int64 {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return int64(k.next)
}

// kvAddresses are where the ranks publish, then where they replay.
func (c Config) kvAddresses() ([]string, error) {
	if c.KVEvents == "" {
		return nil, nil
	}
	return portsFrom(c.KVEvents, 2*c.DPSize, "KV events address")
}

// KVEvents are the addresses of a rank's publisher and of its replays, empty
// when it has none.
func (e *Engine) KVEvents(rank int) (events, replay string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.kvAddrs) == 0 {
		return "", ""
	}
	return e.kvAddrs[rank], e.kvAddrs[e.cfg.DPSize+rank]
}

// serve answers a subscriber, or one who asks for a replay.
func (k *kvEvents) serve(l *life, conn net.Conn, as zmq4.SocketType) {
	z, err := zmq4.Open(conn, null.Security(), as, nil, true, nil)
	switch {
	case err != nil:
	case as == zmq4.Pub:
		k.publish(l, z)
	default:
		k.replay(z)
	}
}

// publish sends batches to one subscriber until it leaves.
func (k *kvEvents) publish(l *life, z *zmq4.Conn) {
	first, err := z.RecvMsg()
	if err != nil || len(first.Frames) != 1 || len(first.Frames[0]) == 0 || first.Frames[0][0] != 1 || !strings.HasPrefix(kvTopic, string(first.Frames[0][1:])) {
		return // no subscription to what there is
	}
	sub := make(chan kvBatch, k.cfg.KVEventsHWM)
	k.mu.Lock()
	k.subs[sub] = struct{}{}
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		delete(k.subs, sub)
		k.mu.Unlock()
	}()
	left := make(chan struct{})
	l.wg.Go(func() { // what else it says does not matter, that it leaves does
		defer close(left)
		for {
			if _, err := z.RecvMsg(); err != nil {
				return
			}
		}
	})
	for {
		select {
		case b := <-sub:
			if k.cfg.KVEventsDelay > 0 {
				select {
				case <-time.After(k.cfg.KVEventsDelay):
				case <-l.ctx.Done():
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

// replay answers who asks for batches until they leave.
func (k *kvEvents) replay(z *zmq4.Conn) {
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
