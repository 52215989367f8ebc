package keys

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"strconv"
)

// Generate returns a new API key of 256 random bits. The key file holds only its hash, so the
// caller must keep the key.
func Generate() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand would end the process instead
	return "ek-" + base64.RawURLEncoding.EncodeToString(b[:])
}

// WriteNew makes a key for `evenkeel keys new` and writes it to out with the
// entry to append to the key file.
func WriteNew(out io.Writer, name string, trusted bool) error {
	key := Generate()
	if _, err := (&entry{Name: name, SHA256: Hash(key)}).check(); err != nil { // serve would refuse an entry with this name, too
		return err
	}
	_, err := fmt.Fprintf(out, `# Give this to the caller; it is shown only once:
#   %s
# Append this to the key file, which begins with the line "keys:". The proxy reads it again within seconds.
  - name: %s
    sha256: %s
    trusted: %t
`, key, strconv.Quote(name), Hash(key), trusted)
	return err
}
