package asked

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAServerIsAskedAndHeard(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		if string(text) == "broken" {
			w.Header().Set("Content-Length", "100")
		}
		w.WriteHeader(http.StatusAccepted)
		_, _ = w.Write(append([]byte(r.Method+" "), text...))
	}))
	t.Cleanup(s.Close)
	heard := ""
	got := Listen(t.Context(), "POST", s.URL, Body{"a": 1}.With(Body{"b": 2}), func(sofar []byte) { heard = string(sofar) })
	require.NoError(t, got.Err)
	require.Equal(t, `202 POST {"a":1,"b":2}`, got.String())
	require.Equal(t, string(got.Body), heard)
	require.Equal(t, "GET ", string(Ask(t.Context(), "GET", s.URL, nil).Body))
	require.Equal(t, "POST {", string(Ask(t.Context(), "POST", s.URL, []byte("{")).Body), "bytes are sent as they are")
	got = Ask(t.Context(), "POST", s.URL, []byte("broken"))
	require.ErrorIs(t, got.Err, io.ErrUnexpectedEOF)
	require.Contains(t, got.String(), "202 POST broken (")
	s.Close()
	require.Error(t, Ask(t.Context(), "GET", s.URL, nil).Err)
}

func TestFieldsOfTwoAnswersAreCompared(t *testing.T) {
	object := func(text string) map[string]any {
		v, err := Parse([]byte(text))
		require.NoError(t, err)
		return v.(map[string]any)
	}
	plain := object(`{"a":{"b":[1,{"c":"x"}]},"same":1.50,"time":7,"none":{}}`)
	different, fields := Compare(plain, object(`{"a":{"b":[2,{}]},"same":1.50,"time":8,"none":{}}`), func(d Difference) bool { return d.Path == "time" })
	var said []string
	for _, d := range different {
		said = append(said, d.String())
	}
	require.Equal(t, []string{`a.b[0]: 2, not 1`, `a.b[1]: "{}", not no such field`, `a.b[1].c: no such field, not "x"`}, said)
	require.Equal(t, 5, fields)
	different, _ = Compare(plain, object(`{"a":{"b":[1,{"c":"x"}]},"same":1.5,"time":7,"none":null}`), func(Difference) bool { return false })
	require.Len(t, different, 2, "a number that is written in another way, and null in place of an object")
	_, err := Parse([]byte(`{"a":`))
	require.ErrorContains(t, err, `in "{\"a\":"`)
}
