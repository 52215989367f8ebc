package edge

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
)

func gzipOf(t testing.TB, plain []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write(plain)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Bytes()
}

// zstdOf writes a frame whose head does not say how long its content is if streamed is set, as a
// client does that sends while it compresses.
func zstdOf(t testing.TB, plain []byte, streamed bool, options ...zstd.EOption) []byte {
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, append([]zstd.EOption{zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(128 << 10)}, options...)...)
	require.NoError(t, err)
	if !streamed {
		return w.EncodeAll(plain, nil)
	}
	for piece := range bytes.Lines(plain) {
		_, err = w.Write(piece)
		require.NoError(t, err)
	}
	require.NoError(t, w.Flush())
	require.NoError(t, w.Close())
	return b.Bytes()
}

func headWith(encodings ...string) *fasthttp.RequestHeader {
	h := &fasthttp.RequestHeader{}
	for _, e := range encodings {
		h.Add("Content-Encoding", e)
	}
	return h
}

// unpacked decodes a body whose memory is charged to a quota, and gives everything back.
func unpacked(t testing.TB, quota *Quota, h *fasthttp.RequestHeader, body []byte, most int) (plain []byte, refused string) {
	reservation := &Reservation{quota: quota, caller: caller{name: "a"}}
	require.True(t, reservation.Acquire(len(body)))
	plain, r := Unpack(h, body, reservation, most)
	if r != nil {
		require.NotEmpty(t, r.Message)
		require.Nil(t, plain)
		refused = r.Code
	} else if c, _ := codingOf(h); c != nil {
		require.EqualValues(t, cap(plain), quota.Held(), "what is kept is charged, and nothing else")
	}
	reservation.Release()
	require.Zero(t, quota.Held())
	return plain, refused
}

func TestABodyIsDecoded(t *testing.T) {
	text := []byte(strings.Repeat("{\"role\": \"user\", \"content\": \"é 🚢\"},\n", 9000))
	noise := make([]byte, 100_000)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	half := len(text) / 2
	for _, c := range []struct {
		name      string
		encodings []string
		body      []byte
		want      []byte
		refused   string
	}{
		{"no coding", nil, text, text, ""},
		{"identity", []string{"Identity"}, text, text, ""},
		{"an empty header", []string{""}, text, text, ""},
		{"gzip", []string{"gzip"}, gzipOf(t, text), text, ""},
		{"gzip in capitals", []string{"GZIP"}, gzipOf(t, text), text, ""},
		{"gzip by its old name", []string{"x-gzip"}, gzipOf(t, text), text, ""},
		{"gzip of what does not get smaller", []string{"gzip"}, gzipOf(t, noise), noise, ""},
		{"gzip of nothing", []string{"gzip"}, gzipOf(t, nil), nil, ""},
		{"two gzip streams, of which the second says its own length", []string{"gzip"}, append(gzipOf(t, text[:half]), gzipOf(t, text[half:])...), text, ""},
		{"zstd that says its length", []string{"zstd"}, zstdOf(t, text, false), text, ""},
		{"zstd that does not", []string{"zstd"}, zstdOf(t, text, true), text, ""},
		{"zstd of what does not get smaller", []string{"zstd"}, zstdOf(t, noise, true), noise, ""},
		{"two zstd frames", []string{"zstd"}, append(zstdOf(t, text[:half], true), zstdOf(t, text[half:], false)...), text, ""},
		{"identity beside a coding", []string{"identity, gzip"}, gzipOf(t, text), text, ""},
		{"identity in a header of its own", []string{"zstd", "identity"}, zstdOf(t, text, false), text, ""},

		{"a coding that is not known", []string{"br"}, text, nil, "unsupported_encoding"},
		{"deflate, which two kinds of senders write in two ways", []string{"deflate"}, text, nil, "unsupported_encoding"},
		{"two codings", []string{"gzip, zstd"}, text, nil, "unsupported_encoding"},
		{"one coding twice", []string{"gzip,gzip"}, gzipOf(t, gzipOf(t, text)), nil, "unsupported_encoding"},
		{"two codings in two headers", []string{"identity", "gzip", "br"}, text, nil, "unsupported_encoding"},

		{"plain text under gzip", []string{"gzip"}, text, nil, "bad_encoding"},
		{"plain text under zstd", []string{"zstd"}, text, nil, "bad_encoding"},
		{"zstd under gzip", []string{"gzip"}, zstdOf(t, text, false), nil, "bad_encoding"},
		{"nothing under gzip", []string{"gzip"}, nil, nil, "bad_encoding"},
		{"something behind gzip", []string{"gzip"}, append(gzipOf(t, text), "more"...), nil, "bad_encoding"},
		{"something behind zstd", []string{"zstd"}, append(zstdOf(t, text, false), "more"...), nil, "bad_encoding"},
		{"a wide window", []string{"zstd"}, zstdOf(t, text, true, zstd.WithWindowSize(16<<20), zstd.WithSingleSegment(false)), nil, "bad_encoding"},
		{"a window that is wider than that of the first frame", []string{"zstd"}, append(zstdOf(t, text[:99], false), zstdOf(t, text[half:], true)...), nil, "bad_encoding"},
		{"a dictionary", []string{"zstd"}, zstdOf(t, text, false, zstd.WithEncoderDictRaw(7, text[:4096])), nil, "bad_encoding"},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain, refused := unpacked(t, NewBodies(64<<20), headWith(c.encodings...), c.body, 1<<20)
			require.Equal(t, c.refused, refused)
			require.Equal(t, string(c.want), string(plain))
		})
	}
}

// A body that was cut off, or changed on its way, is never taken for a whole one.
func TestABrokenBodyIsNotDecoded(t *testing.T) {
	text := []byte(strings.Repeat("data, and data again; ", 40))
	quota := NewBodies(16 << 20)
	for how, body := range map[string][]byte{"gzip": gzipOf(t, text), "zstd": zstdOf(t, text, true), "ZSTD": zstdOf(t, text, false)} {
		for cut := 1; cut < len(body); cut++ {
			_, refused := unpacked(t, quota, headWith(how), body[:cut], 1<<20)
			require.Equal(t, "bad_encoding", refused, "%s, the first %d bytes of %d", how, cut, len(body))
		}
		for at := range body {
			changed := bytes.Clone(body)
			changed[at] ^= 0x10
			plain, refused := unpacked(t, quota, headWith(how), changed, 1<<20)
			if refused == "" { // a byte of the head that says nothing of the content, such as the time in gzip's
				require.Equal(t, string(text), string(plain), "%s, byte %d", how, at)
			}
		}
	}
}

// However small a body is that becomes large, it takes no more than one that came as large.
func TestABombIsBounded(t *testing.T) {
	const most = 1 << 20
	for _, c := range []struct {
		name    string
		size    int
		limit   int64 // of the quota
		refused string
	}{
		{"as large as a body may be", most, 16 << 20, ""},
		{"one byte larger", most + 1, 16 << 20, "body_too_large"},
		{"much larger", 50 << 20, 16 << 20, "body_too_large"},
		{"larger than the memory of all bodies", most, 100 << 10, "overloaded"},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain := make([]byte, c.size)
			for how, body := range map[string][]byte{"gzip": gzipOf(t, plain), "zstd": zstdOf(t, plain, true), "ZSTD": zstdOf(t, plain, false)} {
				got, refused := unpacked(t, NewBodies(c.limit), headWith(how), body, most)
				require.Equal(t, c.refused, refused, how)
				require.Len(t, got, map[bool]int{true: c.size}[c.refused == ""], how)
			}
			many := bytes.Repeat(gzipOf(t, plain[:c.size/64]), 65) // the last says less than all have
			if c.refused == "" {
				return
			}
			_, refused := unpacked(t, NewBodies(c.limit), headWith("gzip"), many, most)
			require.Equal(t, c.refused, refused)
		})
	}
}

// FuzzUnpack holds decoding to its bounds, whatever it is given.
func FuzzUnpack(f *testing.F) {
	text := []byte(strings.Repeat(`{"model":"m","prompt":"a a a"}`, 50))
	bomb := make([]byte, 1<<20)
	for _, body := range [][]byte{nil, gzipOf(f, text), gzipOf(f, bomb), append(gzipOf(f, text), gzipOf(f, text)...)} {
		f.Add("gzip", body)
	}
	for _, body := range [][]byte{zstdOf(f, text, false), zstdOf(f, text, true), zstdOf(f, bomb, false), zstdOf(f, bomb, true)} {
		f.Add("zstd", body)
	}
	f.Add("identity", text)
	f.Fuzz(func(t *testing.T, how string, body []byte) {
		const most = 64 << 10
		quota := NewBodies(16 << 20)
		if len(body) > most {
			return
		}
		plain, _ := unpacked(t, quota, headWith(how), body, most)
		require.LessOrEqual(t, cap(plain), max(most, cap(body)))
		for again, packed := range map[string][]byte{"gzip": gzipOf(t, body), "zstd": zstdOf(t, body, len(how)%2 == 0)} {
			plain, refused := unpacked(t, quota, headWith(again), packed, most)
			require.Empty(t, refused)
			require.Equal(t, string(body), string(plain))
		}
	})
}
