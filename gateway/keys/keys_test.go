package keys

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func parse(t testing.TB, file string) *Set {
	t.Helper()
	s, err := Parse("keys.yaml", []byte(file))
	require.NoError(t, err)
	return s
}

func entryOf(name, key, rest string) string {
	return "  - name: " + name + "\n    sha256: " + Hash(key) + "\n" + rest
}

func TestAuthenticate(t *testing.T) {
	s := parse(t, "keys:\n"+entryOf("ops", "ek-ops", "    trusted: true\n")+entryOf("lab", "ek lab", "    max_concurrent: 2\n"))
	for _, tt := range []struct {
		name, header string
		want         string // Key.Name; "" refused
	}{
		{"a known key", "Bearer ek-ops", "ops"},
		{"the second key of the file", "Bearer ek lab", "lab"},
		{"the scheme has no case", "bEaReR ek-ops", "ops"},
		{"more than one space before the key", "Bearer   ek-ops", "ops"},
		{"an unknown key", "Bearer ek-opt", ""},
		{"a key is compared as a whole", "Bearer ek-op", ""},
		{"a longer key", "Bearer ek-opss", ""},
		{"the hash is not the key", "Bearer " + Hash("ek-ops"), ""},
		{"no header", "", ""},
		{"a scheme without a key", "Bearer ", ""},
		{"a scheme and spaces", "Bearer    ", ""},
		{"another scheme", "Basic ek-ops", ""},
		{"a key without a scheme", "ek-ops", ""},
		{"no space after the scheme", "Bearerek-ops!", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k, ok := s.Authenticate([]byte(tt.header))
			require.Equal(t, tt.want != "", ok, "Authenticate(%q)", tt.header)
			require.Equal(t, tt.want, k.Name, "Authenticate(%q)", tt.header)
			require.Equal(t, tt.want == "ops", k.Trusted, "Authenticate(%q)", tt.header)
		})
	}
}

func TestNoFileMeansEverybodyAndNobodyTrusted(t *testing.T) {
	s, err := Load("")
	require.NoError(t, err)
	require.False(t, s.Required())
	k, ok := s.Authenticate(nil)
	require.True(t, ok)
	require.Equal(t, Key{}, k)
	require.True(t, k.Acquire(1), "no limit")
	k.Release(1)
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	ops := "keys:\n" + entryOf("ops", "a", "")
	for _, tt := range []struct {
		name, file string
		want       []string
	}{
		{"an empty file locks everybody out", "", []string{"no keys", "keys_file empty"}},
		{"a list without entries", "keys: []\n", []string{"no keys"}},
		{"an unknown name", "keys:\n  - name: a\n    secret: b\n", []string{"line 3", "secret", "max_concurrent"}},
		{"an unknown name on top", "users: []\n", []string{"line 1", "users"}},
		{"a wrong type", ops + "    trusted: maybe\n", []string{"line 4", "trusted"}},
		{"not YAML", "keys: [\n", []string{"line 1"}},
		{"no name", "keys:\n  - sha256: " + Hash("a") + "\n", []string{"keys.yaml:2", "needs a name"}},
		{"a name that steers a terminal", "keys:\n" + entryOf(`"a\e[2J"`, "a", ""), []string{"keys.yaml:2", `"a\x1b[2J"`, "512 bytes"}},
		{"a name twice", ops + entryOf("ops", "b", ""), []string{"keys.yaml:4", `"ops"`, "key 1"}},
		{"a key twice", ops + entryOf("lab", "a", ""), []string{"keys.yaml:4", `"lab"`, `"ops"`}},
		{"a negative limit", ops + "    max_concurrent: -1\n", []string{"keys.yaml:2", "max_concurrent", "0 for no limit"}},
		{"a negative rate", ops + "    rpm: -1\n", []string{"keys.yaml:2", "rpm", "0 for no limit"}},
		{"a negative rate of tokens", ops + "    tpm: -1\n", []string{"keys.yaml:2", "tpm", "0 for no limit"}},
		{"a priority beyond all", ops + "    priority: 101\n", []string{"keys.yaml:2", "priority", "-100 to 100"}},
		{"half a hash", "keys:\n  - {name: a, sha256: abcd}\n", []string{"keys.yaml:2", "64 hex digits"}},
		{"a tag where the list belongs", "keys: !x y\n", []string{"must be a list"}},
		{"no hash", "keys:\n  - {name: a}\n", []string{"keys.yaml:2", "64 hex digits"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("keys.yaml", []byte(tt.file))
			require.Error(t, err)
			for _, want := range tt.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestErrorsDoNotRepeatAKeyPastedByMistake(t *testing.T) {
	for _, file := range []string{
		"keys:\n  - name: a\n    sha256: ek-secret\n",
		"keys:\n  - name: a\n    sha256: [ek-secret]\n",
		"keys:\n  - name: a\n    max_concurrent: ek-secret\n",
		"keys:\n  - name: a\n    key: ek-secret\n",
	} {
		_, err := Parse("keys.yaml", []byte(file))
		require.Error(t, err, file)
		require.NotContains(t, err.Error(), "ek-secret", file)
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	_, err := Load(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "evenkeel keys new")

	require.NoError(t, os.WriteFile(path, []byte("# comment\nkeys:\n"+entryOf("ops", "k", "")), 0o600))
	s, err := Load(path)
	require.NoError(t, err)
	require.True(t, s.Required())
	require.Equal(t, 1, len(s.keys))
}

func TestWhatNewPrintsIsAnEntryOfTheFile(t *testing.T) {
	for _, name := range []string{"ops", `od"d: name #1`} {
		var out bytes.Buffer
		require.NoError(t, WriteNew(&out, name, true))
		require.Contains(t, out.String(), `begins with the line "keys:"`, "a first file needs it")
		s := parse(t, "keys:\n"+out.String())
		_, rest, ok := strings.Cut(out.String(), "#   ")
		require.True(t, ok)
		key, _, _ := strings.Cut(rest, "\n")
		k, ok := s.Authenticate([]byte("Bearer " + key))
		require.True(t, ok)
		require.Equal(t, name, k.Name)
		require.True(t, k.Trusted)
	}
	require.NotEqual(t, Generate(), Generate())
}

func TestMaxConcurrentIsSharedAndHolds(t *testing.T) {
	const limit = 3
	s := parse(t, "keys:\n"+entryOf("lab", "k", fmt.Sprintf("    max_concurrent: %d\n", limit)))
	var wg sync.WaitGroup
	slots := make(chan struct{}, limit) // a fourth holder would not find room
	for range 16 {
		wg.Go(func() {
			for range 200 {
				k, ok := s.Authenticate([]byte("Bearer k"))
				if !ok || !k.Acquire(1) {
					continue
				}
				select {
				case slots <- struct{}{}:
					<-slots
				default:
					t.Error("more than max_concurrent at once")
				}
				k.Release(1)
			}
		})
	}
	wg.Wait()

	k, _ := s.Authenticate([]byte("Bearer k"))
	for range limit {
		require.True(t, k.Acquire(1), "every release freed its place")
	}
	require.False(t, k.Acquire(1))
}

func TestAFanOutCountsEveryAnswer(t *testing.T) {
	s := parse(t, "keys:\n"+entryOf("lab", "k", "    max_concurrent: 4\n"))
	k, _ := s.Authenticate([]byte("Bearer k"))
	require.True(t, k.Acquire(3))
	require.False(t, k.Acquire(2), "five")
	require.True(t, k.Acquire(1), "what was refused left nothing behind")
	k.Release(4)
	require.True(t, k.Acquire(4))
}

func TestAChangedFileKeepsWhatRuns(t *testing.T) {
	old := parse(t, "keys:\n"+entryOf("lab", "k", "")+entryOf("gone", "g", "")+entryOf("ops", "o", "    max_concurrent: 1\n"))
	running, _ := old.Authenticate([]byte("Bearer k"))
	require.True(t, running.Acquire(2), "no limit yet, counted all the same")
	gone, _ := old.Authenticate([]byte("Bearer g"))
	require.True(t, gone.Acquire(1))

	s := parse(t, "keys:\n"+entryOf("lab", "k2", "    max_concurrent: 3\n")+entryOf("late", "g", "    max_concurrent: 1\n")+entryOf("ops", "o",
		"    max_concurrent: 1\n"))
	s.KeepUsageOf(old)
	_, ok := s.Authenticate([]byte("Bearer k"))
	require.False(t, ok, "the old key of that name")
	lab, ok := s.Authenticate([]byte("Bearer k2"))
	require.True(t, ok)
	require.True(t, lab.Acquire(1), "the third")
	require.False(t, lab.Acquire(1), "two that began before the change run still")
	running.Release(2)
	require.True(t, lab.Acquire(2))

	strict := parse(t, "keys:\n"+entryOf("lab", "k2", "    max_concurrent: 1\n"))
	strict.KeepUsageOf(s)
	low, _ := strict.Authenticate([]byte("Bearer k2"))
	require.False(t, low.Acquire(1), "three run under a limit of one")
	require.True(t, low.Acquire(0), "nothing more is no harm")
	late, _ := s.Authenticate([]byte("Bearer g"))
	require.True(t, late.Acquire(1), "another name is another caller")
	gone.Release(1)
	require.False(t, late.Acquire(1))
}

func TestOnlyTheExactKeyIsKnown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secrets := rapid.SliceOfNDistinct(rapid.StringMatching(`[!-~]{1,40}`), 1, 20, rapid.ID).Draw(t, "keys")
		var file strings.Builder
		file.WriteString("keys:\n")
		for i, k := range secrets {
			file.WriteString(entryOf(fmt.Sprintf("k%d", i), k, ""))
		}
		s, err := Parse("keys.yaml", []byte(file.String()))
		require.NoError(t, err)
		guess := rapid.OneOf(rapid.SampledFrom(secrets), rapid.StringMatching(`[!-~]{1,40}`)).Draw(t, "guess")
		want := ""
		for i, k := range secrets {
			if k == guess {
				want = fmt.Sprintf("k%d", i)
			}
		}
		k, ok := s.Authenticate([]byte("Bearer " + guess))
		require.Equal(t, want != "", ok)
		require.Equal(t, want, k.Name)
	})
}

func TestAuthenticateAllocatesNothing(t *testing.T) {
	s := parse(t, "keys:\n"+entryOf("ops", "ek-ops", ""))
	header := []byte("Bearer ek-ops")
	require.Zero(t, testing.AllocsPerRun(100, func() { s.Authenticate(header) }))
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("keys:\n" + entryOf("ops", "a", "    trusted: true\n    max_concurrent: 3\n")))
	f.Add([]byte("keys: [{name: a, sha256: &x abc}, *x]\n---\nkeys: []\n"))
	f.Add([]byte("keys: {}\n"))
	f.Add([]byte("\xff\x00- - -"))
	f.Fuzz(func(t *testing.T, src []byte) {
		s, err := Parse("keys.yaml", src)
		if err != nil {
			require.ErrorContains(t, err, "keys.yaml")
			return
		}
		require.True(t, s.Required())
		require.Positive(t, len(s.keys))
	})
}

func BenchmarkAuthenticate(b *testing.B) {
	for _, n := range []int{1, 100, 10_000} {
		var file strings.Builder
		file.WriteString("keys:\n")
		for i := range n {
			file.WriteString(entryOf(fmt.Sprintf("k%d", i), fmt.Sprintf("ek-%d", i), ""))
		}
		s := parse(b, file.String())
		header := []byte("Bearer ek-0")
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.Authenticate(header)
			}
		})
	}
}

// A request for more answers than the key may have is refused. Others of the key have their place
// all the while.
func TestARequestThatIsRefusedTakesNoPlaceFromAnother(t *testing.T) {
	k := limited(t, "    max_concurrent: 1\n")
	stop := make(chan struct{})
	var greedy sync.WaitGroup
	greedy.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				assert.False(t, k.Acquire(8))
			}
		}
	})
	refused := 0
	for range 20_000 {
		if k.Acquire(1) {
			k.Release(1)
		} else {
			refused++
		}
		runtime.Gosched()
	}
	close(stop)
	greedy.Wait()
	require.Zero(t, refused, "of 20000 requests that had a place")
}
