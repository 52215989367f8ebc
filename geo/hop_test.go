package geo

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine"
)

// golden is a hop that every version of this package must write and read alike.
var golden = Hop{
	N: 1, Max: 1, Origin: "us-1", Via: []string{"us-1"}, RID: "rid-0001", Time: 1767225600000,
	Nonce: "00112233445566778899aabbccddeeff", Deadline: 1767225660000,
	To: "eu-1", Boot: "0123456789abcdef0123456789abcdef", Digest: DigestOf(goldenBody()),
}

func goldenBody() []byte { return []byte(`{"model":"m","messages":[{"role":"user","content":"hi"}]}`) }

const goldenSum = "bc415710d5f18ef8f4ca1d1e300560f81c176396165149dd235f546fe95af4cb"

func goldenMessage() Message {
	return Message{Method: http.MethodPost, Target: "/v1/chat/completions", Headers: []engine.Header{
		{Name: TenantHeader, Value: "tenant-a"}, {Name: "X-Evenkeel-Session", Value: "chat 7"}, {Name: "X-Evenkeel-Class", Value: "batch"},
		{Name: "Traceparent", Value: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
	}}
}

func goldenKeys(t testing.TB) *Keys {
	k, err := ParseKeys("a 0123456789abcdef0123456789abcdef\n")
	require.NoError(t, err)
	return k
}

// door is that of eu-1, whose peers are us-1 and asia-1.
func door(keys *Keys, maxHops int) *Verifier {
	eu := newProcess(time.UnixMilli(golden.Time), 30*time.Second)
	eu.name = golden.Boot
	d := &Verifier{self: "eu-1", process: eu, maxHops: maxHops, skew: 30 * time.Second, nonces: newNonces(90 * time.Second),
		certificateNames: func(id string) ([]string, bool) {
			return []string{"spiffe://ek/" + id}, id == "us-1" || id == "asia-1"
		}}
	d.keys.Store(keys)
	return d
}

func TestTheSignatureIsThatOfTheSpecification(t *testing.T) {
	m := goldenMessage()
	keys := goldenKeys(t)
	require.Equal(t, "kid=a;v1="+goldenSum, keys.Sign(&m, &golden))
	require.True(t, keys.Signed("kid=a;v1="+goldenSum, &m, &golden))
	slices.Reverse(m.Headers)
	m.Headers[0].Value = "00-0af7651916cd43dd8448eb211c80319c-0000000000000001-00"
	require.True(t, keys.Signed("kid=a;v1="+goldenSum, &m, &golden), "a mesh on the way may change the order of headers, and the trace")
}

func TestNothingASignatureCoversCanBeChanged(t *testing.T) {
	keys := goldenKeys(t)
	for name, change := range map[string]func(m *Message, h *Hop){
		"the method":           func(m *Message, _ *Hop) { m.Method = "GET" },
		"the path":             func(m *Message, _ *Hop) { m.Target = "/v1/completions" },
		"the query":            func(m *Message, _ *Hop) { m.Target += "?a=b" },
		"the tenant":           func(m *Message, _ *Hop) { m.Headers[0].Value = "tenant-b" },
		"the session":          func(m *Message, _ *Hop) { m.Headers[1].Value = "chat 8" },
		"the class":            func(m *Message, _ *Hop) { m.Headers[2].Value = "online" },
		"no class":             func(m *Message, _ *Hop) { m.Headers = slices.Delete(m.Headers, 2, 3) },
		"an empty class":       func(m *Message, _ *Hop) { m.Headers[2].Value = "" },
		"a second class":       func(m *Message, _ *Hop) { m.Headers = append(m.Headers, m.Headers[2]) },
		"two values exchanged": func(m *Message, _ *Hop) { a, b := &m.Headers[0], &m.Headers[1]; a.Value, b.Value = b.Value, a.Value },
		"a session's end": func(m *Message, _ *Hop) {
			m.Headers = append(m.Headers, engine.Header{Name: "X-Evenkeel-Session-End", Value: "true"})
		},
		"a deadline": func(m *Message, _ *Hop) {
			m.Headers = append(m.Headers, engine.Header{Name: "X-Evenkeel-Deadline-Ms", Value: "1"})
		},
		"a header of a later version": func(m *Message, _ *Hop) { m.Headers = append(m.Headers, engine.Header{Name: "X-Evenkeel-Later"}) },
		"a coding": func(m *Message, _ *Hop) {
			m.Headers = append(m.Headers, engine.Header{Name: "Content-Encoding", Value: "gzip"})
		},
		"the body":      func(_ *Message, h *Hop) { h.Digest = DigestOf([]byte("another")) },
		"the recipient": func(_ *Message, h *Hop) { h.To = "asia-1" },
		"its run":       func(_ *Message, h *Hop) { h.Boot = "another" },
		"the id":        func(_ *Message, h *Hop) { h.RID = "rid-0002" },
		"the origin":    func(_ *Message, h *Hop) { h.Origin = "asia-1" },
		"the way":       func(_ *Message, h *Hop) { h.Via = []string{"asia-1"} },
		"the hops":      func(_ *Message, h *Hop) { h.N = 0 },
		"the limit":     func(_ *Message, h *Hop) { h.Max = 2 },
		"the time":      func(_ *Message, h *Hop) { h.Time++ },
		"the nonce":     func(_ *Message, h *Hop) { h.Nonce = strings.Repeat("0", 32) },
		"the deadline":  func(_ *Message, h *Hop) { h.Deadline++ },
	} {
		t.Run(name, func(t *testing.T) {
			m, h := goldenMessage(), golden
			change(&m, &h)
			require.False(t, keys.Signed("kid=a;v1="+goldenSum, &m, &h))
		})
	}
	for _, header := range []string{"", "kid=a", "kid=a;v1=", "kid=b;v1=" + goldenSum, "v1=" + goldenSum,
		"kid=a;v1=" + strings.ToUpper(goldenSum), "kid=a;v1=" + goldenSum[2:], "kid=a;v1=" + goldenSum + "00"} {
		m := goldenMessage()
		require.False(t, keys.Signed(header, &m, &golden), header)
	}
}

func TestAKeyIsChangedWithoutAPause(t *testing.T) {
	old, err := ParseKeys("old " + strings.Repeat("o", 32))
	require.NoError(t, err)
	both, err := ParseKeys("# since monday\nnew " + strings.Repeat("n", 32) + "\nold " + strings.Repeat("o", 32))
	require.NoError(t, err)
	m := goldenMessage()
	require.True(t, both.Signed(old.Sign(&m, &golden), &m, &golden))
	require.False(t, old.Signed(both.Sign(&m, &golden), &m, &golden), "signed by the first")
}

func TestKeysThatCannotBeUsedAreRefusedWithoutQuotingThem(t *testing.T) {
	for name, text := range map[string]string{
		"there is none":     "\n# nothing\n",
		"a key is short":    "a secret",
		"a line has no id":  strings.Repeat("s", 40),
		"an id comes twice": "a " + strings.Repeat("s", 32) + "\na " + strings.Repeat("t", 32),
		"there are three":   "a " + strings.Repeat("s", 32) + "\nb " + strings.Repeat("t", 32) + "\nc " + strings.Repeat("u", 32),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseKeys(text)
			require.ErrorIs(t, err, ErrKeys)
			require.NotContains(t, err.Error(), "ssss")
			require.NotContains(t, err.Error(), "secret")
		})
	}
}

func TestWhoMayComeIn(t *testing.T) {
	now := time.UnixMilli(golden.Time)
	for _, row := range []struct {
		name   string
		hop    func(h *Hop)
		knock  func(k *Credentials)
		late   time.Duration
		again  bool // the same request was here before
		status int
		reject string
	}{
		{name: "a hop of one allowed is accepted"},
		{name: "two hops of one allowed", hop: func(h *Hop) { h.N = 2; h.Via = []string{"us-1", "asia-1"} }, knock: func(k *Credentials) { k.Names = []string{"spiffe://ek/asia-1"} }, status: 508, reject: RejectHop},
		{name: "more hops than are allowed here", hop: func(h *Hop) { h.Max = 5 }, status: 508, reject: RejectHop},
		{name: "via contains ourselves", hop: func(h *Hop) { h.N, h.Via = 3, []string{"us-1", "eu-1", "us-1"} }, status: 508, reject: RejectHop},
		{name: "hops and via disagree", hop: func(h *Hop) { h.N = 0 }, status: 508, reject: RejectHop},
		{name: "no hop at all", knock: func(k *Credentials) { k.Hop = "" }, status: 508, reject: RejectHop},
		{name: "of the version before", knock: func(k *Credentials) { k.Hop = "v2" + k.Hop[2:] }, status: 400, reject: RejectVersion},
		{name: "of a version yet to come", knock: func(k *Credentials) { k.Hop = "v4" + k.Hop[2:] }, status: 400, reject: RejectVersion},
		{name: "of no version", knock: func(k *Credentials) { k.Hop = "va" + k.Hop[2:] }, status: 508, reject: RejectHop},
		{name: "sent to another proxy", hop: func(h *Hop) { h.To = "asia-1" }, status: 421, reject: RejectRecipient},
		{name: "sent to one whose name begins like ours", hop: func(h *Hop) { h.To = "eu" }, status: 421, reject: RejectRecipient},
		{name: "sent to an earlier run", hop: func(h *Hop) { h.Boot = "another" }, status: 421, reject: RejectRecipient},
		{name: "sent to any run", hop: func(h *Hop) { h.Boot = "" }, status: 421, reject: RejectRecipient},
		{name: "another body than was signed", knock: func(k *Credentials) { k.Body = []byte("{}") }, status: 401, reject: RejectSignature},
		{name: "31 seconds old", late: 31 * time.Second, status: 401, reject: RejectStale},
		{name: "31 seconds ahead", late: -31 * time.Second, status: 401, reject: RejectStale},
		{name: "30 seconds old is believed", late: 30 * time.Second},
		{name: "the same nonce again", again: true, status: 401, reject: RejectSignature},
		{name: "no signature", knock: func(k *Credentials) { k.Signature = "" }, status: 401, reject: RejectSignature},
		{name: "another tenant than was signed", knock: func(k *Credentials) { k.Headers[0].Value = "b" }, status: 401, reject: RejectSignature},
		{name: "a stranger with the key", hop: func(h *Hop) { h.Origin, h.Via = "mars-1", []string{"mars-1"} }, status: 403, reject: RejectPeer},
		{name: "a peer that speaks for a stranger", hop: func(h *Hop) { h.Origin = "mars-1" }, status: 403, reject: RejectPeer},
		{name: "a peer with another peer's certificate", knock: func(k *Credentials) { k.Names = []string{"spiffe://ek/asia-1"} }, status: 403, reject: RejectPeer},
		{name: "ourselves", hop: func(h *Hop) { h.Origin, h.Via = "eu-1", []string{"eu-1"} }, status: 403, reject: RejectPeer},
	} {
		t.Run(row.name, func(t *testing.T) {
			keys := goldenKeys(t)
			d, h := door(keys, 1), golden
			if row.hop != nil {
				row.hop(&h)
			}
			m := goldenMessage()
			k := Credentials{Message: m, Body: goldenBody(), Hop: h.String(), Signature: keys.Sign(&m, &h), Certified: true,
				Names: []string{"spiffe://ek/us-1"}}
			if row.knock != nil {
				row.knock(&k)
			}
			if row.again {
				_, refusal := d.Verify(&k, now)
				require.Nil(t, refusal)
			}
			got, refusal := d.Verify(&k, now.Add(row.late))
			if row.status == 0 {
				require.Nil(t, refusal)
				require.Equal(t, golden, got)
				return
			}
			require.NotNil(t, refusal)
			require.Equal(t, row.status, refusal.Status)
			require.Equal(t, row.reject, refusal.Reject)
		})
	}
}

func TestARequestThatMayGoFurtherIsHeldAgainstItsWay(t *testing.T) {
	for _, row := range []struct {
		name, origin string
		via          []string
		status       int
	}{
		{"the second of three hops", "us-1", []string{"us-1", "asia-1"}, 0},
		{"it was here before", "us-1", []string{"us-1", "eu-1", "asia-1"}, 508},
		{"its origin is not where it began", "us-1", []string{"asia-1"}, 403},
	} {
		keys := goldenKeys(t)
		d, h, m := door(keys, 3), golden, goldenMessage()
		h.Origin, h.Via, h.N, h.Max = row.origin, row.via, len(row.via), 3
		_, refusal := d.Verify(&Credentials{Message: m, Body: goldenBody(), Hop: h.String(), Signature: keys.Sign(&m, &h), Certified: true,
			Names: []string{"spiffe://ek/asia-1"}}, time.UnixMilli(h.Time))
		if row.status == 0 {
			require.Nil(t, refusal, row.name)
			continue
		}
		require.NotNil(t, refusal, row.name)
		require.Equal(t, row.status, refusal.Status, row.name)
	}
}

func TestWithoutKeysACertificateIsEnoughAndNothingIsNot(t *testing.T) {
	d := door(nil, 1)
	k := Credentials{Message: goldenMessage(), Body: goldenBody(), Hop: golden.String()}
	_, refusal := d.Verify(&k, time.UnixMilli(golden.Time))
	require.Equal(t, 401, refusal.Status)
	k.Certified, k.Names = true, []string{"spiffe://ek/us-1"}
	_, refusal = d.Verify(&k, time.UnixMilli(golden.Time))
	require.Nil(t, refusal)
}

// A recorded hop is not accepted again after the wall clock was set back: it would not be too old
// any more, and its nonce is forgotten.
func TestAClockThatIsSetBackMakesNoRecordedHopNew(t *testing.T) {
	d := door(goldenKeys(t), 1)
	message := goldenMessage()
	k := Credentials{Message: message, Body: goldenBody(), Hop: golden.String(), Signature: d.keys.Load().Sign(&message, &golden)}
	at := time.UnixMilli(golden.Time)
	_, refusal := d.Verify(&k, at)
	require.Nil(t, refusal)
	d.nonces = newNonces(time.Minute)
	for _, step := range []struct {
		back time.Duration // since the start
		want bool          // the process has its name
	}{
		{0, true}, {-time.Hour, true}, {-time.Hour + 30*time.Second, true}, {-time.Hour, true}, {-time.Hour + 31*time.Second, false}, {0, false},
	} {
		d.process.wall = func(now time.Time) time.Time { return now.Add(-step.back) }
		require.Equal(t, step.want, d.process.nameAt(at) == golden.Boot, "set back by %v", step.back)
	}
	_, refusal = d.Verify(&k, at)
	require.NotNil(t, refusal)
	require.Equal(t, RejectRecipient, refusal.Reject)
	name := d.process.nameAt(at)
	require.Equal(t, name, d.process.nameAt(at.Add(time.Hour)), "the clock runs on")
}

func TestNoncesAreForgottenOldestFirst(t *testing.T) {
	n := newNonces(time.Minute)
	start := time.Unix(1000, 0)
	nonce := func(i int) string { return fmt.Sprintf("%032x", i) }
	for i := range maxNonces {
		require.True(t, n.remember(nonce(i), start))
	}
	require.False(t, n.remember(nonce(1), start), "still known")
	require.True(t, n.remember(nonce(-1), start))
	require.LessOrEqual(t, len(n.known), maxNonces)
	require.True(t, n.remember(nonce(0), start), "the oldest had to go")
	require.True(t, n.remember(nonce(maxNonces-1), start.Add(time.Minute)), "its time is over")
	require.Len(t, n.known, 1)
}

func TestAHopIsReadAsItWasWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-zA-Z0-9._:/@-]{1,64}`)
		h := Hop{
			N: rapid.IntRange(0, 99).Draw(t, "n"), Max: rapid.IntRange(0, 99).Draw(t, "max"), Origin: name.Draw(t, "origin"),
			Via: rapid.SliceOfN(name, 1, maxVia).Draw(t, "via"), RID: name.Draw(t, "rid"), Time: rapid.Int64Range(0, maxMillis).Draw(t, "ts"),
			Nonce: rapid.StringMatching(`[0-9a-f]{32}`).Draw(t, "nonce"), Deadline: rapid.Int64Range(0, maxMillis).Draw(t, "deadline"),
			To: name.Draw(t, "to"), Boot: rapid.StringMatching(`[a-z0-9]{0,64}`).Draw(t, "boot"), Digest: rapid.StringMatching(`[0-9a-f]{64}`).Draw(t, "body"),
		}
		got, err := ParseHop(h.String())
		if len(h.String()) > maxHop {
			require.ErrorIs(t, err, ErrHop)
			return
		}
		require.NoError(t, err)
		require.Equal(t, h, got)
	})
}

func FuzzParseHop(f *testing.F) {
	f.Add(golden.String())
	f.Add("v2;n=01;max=1")
	f.Add(golden.String() + ";")
	f.Add(strings.Replace(golden.String(), "via=us-1", "via=us-1,,", 1))
	f.Fuzz(func(t *testing.T, text string) {
		h, err := ParseHop(text)
		if err != nil {
			return
		}
		if got := h.String(); got != text { // else the signature would cover what nobody read
			t.Fatalf("%q was read as %q", text, got)
		}
	})
}

// The parts of a request can be read back from the text that is signed, so that no two requests
// have the same text.
func FuzzSignedText(f *testing.F) {
	f.Add("POST", "/v1/completions", "A", "b", "C", "d")
	f.Add("1:2", "3:\n4", "Session", "", "Session", "5:")
	f.Add("", "", "Class\n6:online", "7:X-Evenkeel-Class", "Class", "6:online")
	f.Fuzz(func(t *testing.T, method, target, name, value, otherName, otherValue string) {
		m := Message{Method: method, Target: target, Headers: []engine.Header{
			{Name: "X-Evenkeel-" + name, Value: value}, {Name: name, Value: value}, {Name: "X-Evenkeel-" + otherName, Value: otherValue},
		}}
		want := []string{method, target, golden.String()}
		headers := slices.DeleteFunc(slices.Clone(m.Headers), func(h engine.Header) bool { return !Covered(h.Name) })
		slices.SortStableFunc(headers, func(a, b engine.Header) int { return strings.Compare(a.Name, b.Name) })
		for _, h := range headers {
			want = append(want, h.Name, h.Value)
		}
		var got []string
		for text := string(m.text(&golden)); text != ""; {
			digits, rest, _ := strings.Cut(text, ":")
			length, err := strconv.Atoi(digits)
			if err != nil || length > len(rest) {
				t.Fatalf("no part begins at %q", text)
			}
			got, text = append(got, rest[:length]), rest[length:]
		}
		if !slices.Equal(want, got) {
			t.Fatalf("%q was signed as %q", want, got)
		}
	})
}

func BenchmarkSign(b *testing.B) {
	keys, m := goldenKeys(b), goldenMessage()
	body := make([]byte, 16<<10)
	for i := range body {
		body[i] = byte(rand.Int())
	}
	h := golden
	b.ReportAllocs()
	for b.Loop() {
		h.Digest = DigestOf(body)
		keys.Sign(&m, &h)
	}
}
